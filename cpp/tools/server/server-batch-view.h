#pragma once

#include "common.h"

#include <cstdint>
#include <functional>
#include <vector>

class server_slots;

// A view of the batch of the server, for the classes in server-parts.h. Each token of the batch belongs to a slot.
class server_batch_view {
public:
    // batch: upstream's server_batch. slots: upstream's slots. Both must outlive this object
    template <typename batch_t, typename slot_t>
    void bind(batch_t & batch, std::vector<slot_t> & slots) {
        get_rendered    = [&batch]() -> const common_batch & { return batch.view; };
        get_size        = [&batch]() { return batch.size(); };
        get_id_slot     = [&batch](int32_t i) -> int32_t & { return batch.tokens[i].id_slot; };
        clear_batch     = [&batch]() { batch.clear(); };
        get_id_batched  = [&batch]() { return batch.slot_batched ? batch.slot_batched->id : -1; };
        set_id_batched  = [&batch, &slots](int32_t id) { batch.slot_batched = &slots[id]; };
    }

    // return the part of the batch that is being decoded
    const common_batch & rendered() const { return get_rendered(); }

    int32_t size() const { return get_size(); }

    // return the slot of token i of the batch. -1 means: the token was dropped from the batch
    int32_t id_slot(int32_t i) const { return get_id_slot(i); }

    // return the number of tokens of a slot in the batch, from index off on
    int32_t count(int32_t id_slot, int32_t off) const;

    // drop the tokens of a slot from index off on, and return their number. The other tokens keep their indices
    int32_t drop(int32_t id_slot, int32_t off);

    // return the number of tokens from index off to the next dropped token, at most n_max
    int32_t n_until_dropped(int32_t off, int32_t n_max) const;

    // replace upstream's slot_batched if the request of this slot has ended
    // slot_batched is the slot whose LoRA adapters and embedding mode apply to the whole batch. Its replacement is the slot of
    // the first token that was not dropped. If all tokens were dropped, clear the batch.
    void keep_slot_batched(server_slots & slots);

private:
    std::function<const common_batch & ()> get_rendered;
    std::function<int32_t()>               get_size;
    std::function<int32_t & (int32_t)>     get_id_slot;
    std::function<void()>                  clear_batch;
    std::function<int32_t()>               get_id_batched; // id of the slot that the batch is prepared for. -1 means: none
    std::function<void(int32_t)>           set_id_batched;
};
