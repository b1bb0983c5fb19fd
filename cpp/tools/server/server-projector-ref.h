#pragma once

// A use of the multimodal projector (mmproj): it is not freed as long as somebody has one of these.

#include "mtmd.h"

#include <functional>
#include <memory>
#include <utility>

class server_projector_ref {
public:
    using find_t = std::function<std::shared_ptr<mtmd_context>()>;

    server_projector_ref() = default;

    // find: how to get it if ctx is null, throws why not; null on a server that never has one
    server_projector_ref(std::shared_ptr<mtmd_context> ctx, find_t find) : ctx(std::move(ctx)), find(std::move(find)) {}

    explicit operator bool() const { return ctx != nullptr; }

    // null if there is none
    mtmd_context * get() const { return ctx.get(); }

    // for a request that has media: if the projector is not there at the moment, it is after this, or this throws
    void check() const {
        if (!ctx && find) {
            ctx = find();
        }
    }

private:
    mutable std::shared_ptr<mtmd_context> ctx;

    find_t find;
};
