#pragma once

// A use of the multimodal projector (mmproj): it is not freed as long as somebody has one of these.

#include "mtmd.h"

#include <memory>
#include <utility>

class server_mctx_ref {
public:
    server_mctx_ref() = default;
    server_mctx_ref(std::shared_ptr<mtmd_context> ctx, void (* refuse)()) : ctx(std::move(ctx)), refuse(refuse) {}

    explicit operator bool() const { return ctx != nullptr; }

    // null if there is none
    mtmd_context * get() const { return ctx.get(); }

    // throws if there is a projector that is not there at the moment
    void check() const {
        if (refuse) {
            refuse();
        }
    }

private:
    std::shared_ptr<mtmd_context> ctx;

    void (* refuse)() = nullptr; // throws why
};
