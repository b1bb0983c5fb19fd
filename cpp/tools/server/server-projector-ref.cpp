#include "server-projector-ref.h"

#include <utility>

server_projector_ref::server_projector_ref(std::shared_ptr<mtmd_context> ctx, find_t find)
    : ctx(std::move(ctx)), find(std::move(find)) {}

void server_projector_ref::check() const {
    if (!ctx && find) {
        ctx = find();
    }
}
