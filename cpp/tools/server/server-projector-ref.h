#pragma once

#include "mtmd.h"

#include <functional>
#include <memory>

// A reference to the multimodal projector (mmproj). The server counts the references, and does not free the projector while one
// exists.
class server_projector_ref {
public:
    using find_t = std::function<std::shared_ptr<mtmd_context>()>;

    server_projector_ref() = default;

    // find: check() calls this function if ctx is null. It loads the projector, or throws an error with the reason. null means:
    //       the server has no projector
    server_projector_ref(std::shared_ptr<mtmd_context> ctx, find_t find);

    explicit operator bool() const { return ctx != nullptr; }

    // return the projector. The result is null if the projector is not loaded
    mtmd_context * get() const { return ctx.get(); }

    // load the projector for a request with media, if it is not loaded. throw if that fails
    void check() const;

private:
    mutable std::shared_ptr<mtmd_context> ctx;

    find_t find;
};
