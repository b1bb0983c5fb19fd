"""Share the turns of a chat whose tokens a script keeps, so that each prompt begins with exactly the earlier tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvtool.verify.server import LlamaServer


class Turn(NamedTuple):
    """Count the tokens of the prompt of one turn.

    prompt: all tokens of the prompt
    cached: the tokens that the server did not compute
    known: the tokens that the server has computed in earlier turns
    """

    prompt: int
    cached: int
    known: int


def take_turn(server: LlamaServer, chat: list[int], text: str, n_predict: int, **more: Any) -> Turn:
    """Append the tokens of a text and of the server's answer to a chat.

    more: additional fields of both requests, such as the model of a router
    """
    known = max(0, len(chat) - 1)  # the last token of an answer has no cell
    chat += server.post("/tokenize", {"content": text, **more})["tokens"]
    body = {"prompt": chat, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    answer = server.post("/completion", {**body, **more})
    turn = Turn(len(chat), answer["timings"]["cache_n"], known)
    chat += answer["tokens"]
    return turn
