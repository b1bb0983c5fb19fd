#pragma once

#include "common.h"

#include <cstdint>
#include <functional>
#include <vector>

class server_slots;

// The batch of a server as its parts see it: which slot each entry belongs to.
class server_batch_view {
public:
    // batch: upstream's server_batch, slots: upstream's slots. both must outlive the view
    template <typename batch_t, typename slot_t>
    void bind(batch_t & batch, std::vector<slot_t> & slots) {
        get_rendered    = [&batch]() -> const common_batch & { return batch.view; };
        get_size        = [&batch]() { return batch.size(); };
        get_id_slot     = [&batch](int32_t i) -> int32_t & { return batch.tokens[i].id_slot; };
        clear_batch     = [&batch]() { batch.clear(); };
        get_id_batched  = [&batch]() { return batch.slot_batched ? batch.slot_batched->id : -1; };
        set_id_batched  = [&batch, &slots](int32_t id) { batch.slot_batched = &slots[id]; };
    }

    // return the entries that are decoded at the moment
    const common_batch & rendered() const { return get_rendered(); }

    int32_t size() const { return get_size(); }

    // return the slot of an entry, -1 if it was dropped
    int32_t id_slot(int32_t i) const { return get_id_slot(i); }

    // return the number of entries of a slot from the off-th entry on
    int32_t count(int32_t id_slot, int32_t off) const;

    // drop the entries of a slot from the off-th entry on, and return their number. the indices of other entries stay
    int32_t drop(int32_t id_slot, int32_t off);

    // return the number of entries from index off on, at most n_max, up to the first dropped entry
    int32_t n_until_dropped(int32_t off, int32_t n_max) const;

    // set the batch up for one of its slots again, after the slot that it was set up for may have ended
    void keep_slot_batched(server_slots & slots);

private:
    std::function<const common_batch & ()> get_rendered;
    std::function<int32_t()>               get_size;
    std::function<int32_t & (int32_t)>     get_id_slot;
    std::function<void()>                  clear_batch;
    std::function<int32_t()>               get_id_batched; // -1: none
    std::function<void(int32_t)>           set_id_batched;
};
