/* Eviction of rows: those that are too old, or the least recently touched if there is no room. Which ones depends on
 * ids and updates alone, not on their positions. */
#include "core.h"
#include "row_table.h"

#include <stdlib.h>
#include <string.h>

/* When an entry was touched last; of entries of the same update, the lowest id is evicted first. */
struct age {
    int64_t id;
    uint32_t update;
};

static inline int is_older(struct age a, struct age b) {
    return a.update != b.update ? a.update < b.update : a.id < b.id;
}

/* Quickselect: moves the `count` oldest to the front, and returns the youngest of them. */
static struct age select_oldest(struct age *ages, size_t length, size_t count) {
    size_t low = 0, high = length - 1, place = count - 1;
    while (low < high) {
        struct age pivot = ages[low + (high - low) / 2];
        size_t i = low, j = high;
        for (;;) {
            while (is_older(ages[i], pivot)) i++;
            while (is_older(pivot, ages[j])) j--;
            if (i >= j) break;
            struct age other = ages[i];
            ages[i++] = ages[j];
            ages[j--] = other;
        }
        if (place <= j) high = j;
        else low = j + 1;
    }
    return ages[place];
}

/* Which entries of one kind (rows, or candidates) are evicted. */
struct cut {
    uint64_t left; /* entries that are not too old */
    uint64_t loose; /* those of them that this update does not touch */
    struct age last; /* this one and all older ones are evicted */
    int is_needed;
};

struct sweep {
    const struct table *t;
    uint64_t number, keep;
    unsigned char *touched;
};

static inline int is_touched(const struct sweep *s, size_t slot) { return s->touched[slot / 8] >> slot % 8 & 1; }

static inline int is_too_old(const struct sweep *s, const struct entry *entry) {
    return s->keep && s->number - entry->update > s->keep;
}

static void count_left(const struct sweep *s, struct cut cuts[2]) {
    for (size_t slot = 0; slot < s->t->num_slots; slot++) {
        const struct entry *entry = &s->t->index[slot];
        if (!entry->place) continue;
        int touched = is_touched(s, slot);
        if (!touched && is_too_old(s, entry)) continue;
        struct cut *cut = &cuts[has_row(entry)];
        cut->left++;
        cut->loose += !touched;
    }
}

/* Make room for `more`, plus a sixteenth of the capacity, so that a sweep is not repeated for every few rows. */
static int place_cut(const struct sweep *s, struct cut *cut, int rows, uint64_t more, uint64_t room) {
    if (cut->left + more <= room) return 0;
    uint64_t goes = cut->left + more - room;
    if (goes > cut->loose) return MH_ROWS_NO_ROOM;
    goes = goes + room / 16 > cut->loose ? cut->loose : goes + room / 16;
    struct age *ages = malloc(cut->loose * sizeof *ages);
    if (ages == NULL) return MH_NO_MEMORY;
    size_t length = 0;
    for (size_t slot = 0; slot < s->t->num_slots; slot++) {
        const struct entry *entry = &s->t->index[slot];
        if (!entry->place || has_row(entry) != rows || is_touched(s, slot) || is_too_old(s, entry)) continue;
        ages[length++] = (struct age){entry->id, entry->update};
    }
    cut->last = select_oldest(ages, length, goes);
    cut->is_needed = 1;
    free(ages);
    return 0;
}

static int goes(const struct sweep *s, const struct cut cuts[2], size_t slot) {
    const struct entry *entry = &s->t->index[slot];
    if (is_touched(s, slot)) return 0;
    if (is_too_old(s, entry)) return 1;
    const struct cut *cut = &cuts[has_row(entry)];
    return cut->is_needed && !is_older(cut->last, (struct age){entry->id, entry->update});
}

static void rebuild(struct table *t, const struct sweep *s, const struct cut cuts[2]) {
    struct entry *old = t->index;
    struct table other = *t;
    other.state.index ^= 1;
    other.index = t->indexes[other.state.index];
    memset(other.index, 0, t->num_slots * sizeof *other.index);
    for (size_t slot = 0; slot < t->num_slots; slot++) {
        const struct entry *entry = &old[slot];
        if (!entry->place) continue;
        if (!goes(s, cuts, slot)) {
            other.index[slot_of(&other, entry->id)] = *entry;
        } else if (has_row(entry)) {
            other.free[other.state.free++] = entry->place - 1;
            other.state.rows--;
        } else {
            other.state.candidates--;
        }
    }
    *t = other;
}

static int is_due(const struct table *t, uint64_t keep, uint64_t number) {
    uint64_t period = keep / 8 ? keep / 8 : 1;
    return keep && number / period != t->state.number / period;
}

static int sweep_now(struct table *t, struct sweep *s, const struct need *need, int may_evict) {
    struct cut cuts[2] = {{0}, {0}};
    const struct mh_rows_room *room = &t->head->room;
    count_left(s, cuts);
    int failed = 0, full = cuts[1].left + need->rows > room->rows ||
                           cuts[0].left - need->admitted + need->candidates > room->candidates;
    if (full && !may_evict) return MH_ROWS_NO_ROOM;
    if (full) failed = place_cut(s, &cuts[1], 1, need->rows, room->rows);
    if (full && !failed) {
        failed = place_cut(s, &cuts[0], 0, need->candidates, room->candidates + need->admitted);
    }
    if (!failed) rebuild(t, s, cuts);
    return failed;
}

int mh_rows_sweep(struct table *t, const struct mh_rows_rule *rule, uint64_t number, const struct spot *spots, size_t count,
                  const struct need *need, int may_evict, int *swept) {
    const struct mh_rows_room *room = &t->head->room;
    int full = t->state.rows + need->rows > room->rows ||
               t->state.candidates - need->admitted + need->candidates > room->candidates;
    int due = is_due(t, rule->keep_updates, number);
    *swept = 0;
    if (!full && !due) return 0;
    struct sweep s = {t, number, due ? rule->keep_updates : 0, calloc(t->num_slots / 8 + 1, 1)};
    if (s.touched == NULL) return MH_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        if (spots[i].slot != NOWHERE) s.touched[spots[i].slot / 8] |= (unsigned char)(1 << spots[i].slot % 8);
    }
    int failed = sweep_now(t, &s, need, may_evict);
    free(s.touched);
    *swept = !failed;
    return failed;
}
