#pragma once

#include "mtmd.h"

#include <functional>
#include <memory>

// A counted use of the multimodal projector (mmproj). The projector is not freed while a reference to it exists.
class server_projector_ref {
public:
    using find_t = std::function<std::shared_ptr<mtmd_context>()>;

    server_projector_ref() = default;

    // find: called by check() if ctx is null. it loads the projector or throws the reason. null on a server without projector
    server_projector_ref(std::shared_ptr<mtmd_context> ctx, find_t find);

    explicit operator bool() const { return ctx != nullptr; }

    // return the projector, null if it is not loaded
    mtmd_context * get() const { return ctx.get(); }

    // load the projector if it is not loaded, for a request with media. throw if that fails
    void check() const;

private:
    mutable std::shared_ptr<mtmd_context> ctx;

    find_t find;
};
