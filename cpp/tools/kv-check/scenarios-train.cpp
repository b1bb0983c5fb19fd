// Check of training (--train): opt_epoch_iter() grows the caches to their full size before it starts, because they cannot grow
// during training.
//
// The check compares the loss, and the answers of the trained model. It runs last, because it changes the weights.

#include "scenarios.h"

#include "ggml-opt.h"

#include <cstdint>
#include <memory>

namespace {

using dataset_ptr = std::unique_ptr<ggml_opt_dataset, decltype(&ggml_opt_dataset_free)>;
using result_ptr  = std::unique_ptr<ggml_opt_result,  decltype(&ggml_opt_result_free)>;

// return n sequences of n_ctx tokens, in which each token predicts the next one
dataset_ptr make_dataset(const side & s, int64_t n_ctx, int64_t n) {
    dataset_ptr res(ggml_opt_dataset_init(GGML_TYPE_I32, GGML_TYPE_I32, n_ctx, n_ctx, n, 1), ggml_opt_dataset_free);

    auto * data   = (int32_t *) ggml_opt_dataset_data  (res.get())->data;
    auto * labels = (int32_t *) ggml_opt_dataset_labels(res.get())->data;
    for (int64_t i = 0; i < n_ctx*n; ++i) {
        data[i]   = (int32_t) ( i     *2654435761u % s.n_vocab);
        labels[i] = (int32_t) ((i + 1)*2654435761u % s.n_vocab);
    }

    return res;
}

} // namespace

void kv_check_train(side & s) {
    if (!s.params.train) {
        throw check_skipped("training is not requested (--train)");
    }

    session_params sp = kv_check_base(s);
    sp.n_cells = 1024;
    sp.n_seqs  = 1;

    session c(s, sp, "train");

    llama_opt_params params = {};
    params.param_filter   = llama_opt_param_filter_all;
    params.get_opt_pars   = ggml_opt_get_default_optimizer_params;
    params.optimizer_type = GGML_OPT_OPTIMIZER_TYPE_ADAMW;
    llama_opt_init(c.ctx, s.model, params);

    const auto dataset = make_dataset(s, sp.n_cells, 2);

    const result_ptr train(ggml_opt_result_init(), ggml_opt_result_free);
    const result_ptr eval (ggml_opt_result_init(), ggml_opt_result_free);
    llama_opt_epoch(c.ctx, dataset.get(), train.get(), eval.get(), 1, nullptr, nullptr);

    for (const auto * res : { &train, &eval }) {
        double loss = 0.0;
        ggml_opt_result_loss(res->get(), &loss, nullptr);
        s.out.value(res == &train ? "train.loss" : "eval.loss", (int64_t) (1e9*loss));
    }

    session d(s, kv_check_base(s), "trained");
    d.fill(300);
    d.generate(3);
}
