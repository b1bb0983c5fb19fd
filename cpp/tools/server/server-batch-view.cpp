#include "server-batch-view.h"

#include "server-slot.h"

int32_t server_batch_view::count(int32_t id_slot, int32_t off) const {
    int32_t n = 0;
    for (int32_t i = off; i < size(); i++) {
        n += get_id_slot(i) == id_slot;
    }
    return n;
}

int32_t server_batch_view::drop(int32_t id_slot, int32_t off) {
    int32_t n = 0;
    for (int32_t i = off; i < size(); i++) {
        if (get_id_slot(i) == id_slot) {
            get_id_slot(i) = -1;
            n++;
        }
    }
    return n;
}

int32_t server_batch_view::n_until_dropped(int32_t off, int32_t n_max) const {
    int32_t n = 0;
    while (n < n_max && off + n < size() && get_id_slot(off + n) != -1) {
        n++;
    }
    return n;
}

void server_batch_view::keep_slot_batched(server_slots & slots) {
    const int32_t id_batched = get_id_batched();
    if (id_batched != -1 && slots[id_batched].is_processing()) {
        return;
    }

    int32_t i = 0;
    while (i < size() && get_id_slot(i) == -1) {
        i++;
    }
    if (i == size()) {
        clear_batch();
    } else {
        set_id_batched(get_id_slot(i));
    }
}
