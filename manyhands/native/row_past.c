/* Rows as they were before the last update: its journal has what it changed, and the table's other state is the one
 * from before it. For a worker that repeats a step which some tables have applied and others have not. */
#include "core.h"
#include "row_table.h"

#include <stdlib.h>
#include <string.h>

/* The journal's record of a slot of the index, or of a row. */
struct mark {
    uint64_t key;
    const unsigned char *record; /* NULL: empty */
};

struct past {
    struct table t; /* with the index from before the update */
    struct mark *marks;
    size_t mask;
};

static inline uint64_t slot_key(uint64_t slot) { return 2 * slot; }
static inline uint64_t row_key(uint64_t row) { return 2 * row + 1; }

static struct mark *mark_of(const struct past *p, uint64_t key) {
    size_t at = mh_mix(key) & p->mask;
    while (p->marks[at].record != NULL && p->marks[at].key != key) at = (at + 1) & p->mask;
    return &p->marks[at];
}

static void mark_record(const struct past *p, uint64_t key, const unsigned char *record) {
    struct mark *mark = mark_of(p, key);
    if (mark->record == NULL) *mark = (struct mark){key, record};
}

static int open_past(struct past *p, const struct table *t, const struct mh_rows_room *room) {
    const struct head *head = t->head;
    size_t length = head->journal_length < room->touched ? head->journal_length : room->touched, slots = 16;
    while (slots < 4 * length) slots *= 2; /* two marks per record, at most half full */
    *p = (struct past){*t, calloc(slots, sizeof *p->marks), slots - 1};
    if (p->marks == NULL) return MH_NO_MEMORY;
    p->t.index = t->indexes[head->states[(head->current & 1) ^ 1].index & 1];
    for (size_t i = 0; i < length; i++) {
        const unsigned char *at = t->journal + i * t->record_bytes;
        struct record record;
        memcpy(&record, at, sizeof record);
        if (record.slot != NOWHERE) mark_record(p, slot_key(record.slot), at);
        if (record.row != NOWHERE) mark_record(p, row_key(record.row), at);
    }
    return 0;
}

static struct entry entry_then(const struct past *p, size_t slot) {
    const unsigned char *at = mark_of(p, slot_key(slot))->record;
    struct record record = {.entry = p->t.index[slot]};
    if (at != NULL) memcpy(&record, at, sizeof record);
    return record.entry;
}

static struct entry found_then(const struct past *p, int64_t id) {
    size_t slot = home_of(&p->t, id);
    struct entry entry = entry_then(p, slot);
    for (size_t left = p->t.num_slots; left && entry.place && entry.id != id; left--) {
        slot = slot + 1 == p->t.num_slots ? 0 : slot + 1;
        entry = entry_then(p, slot);
    }
    return entry;
}

static const void *row_then(const struct past *p, uint64_t row) {
    const unsigned char *at = mark_of(p, row_key(row))->record;
    return at != NULL ? (const void *)(at + sizeof(struct record)) : row_at(&p->t, row);
}

int mh_rows_has_past(const struct table *t, uint64_t at_most) {
    uint64_t number = t->head->states[t->head->current & 1].number;
    return number > at_most && t->head->journal_number == number;
}

int mh_rows_look_back(const struct table *t, const struct mh_rows_room *room, const struct mh_rows_rule *rule,
                      const int64_t *ids, size_t count, const struct target *target) {
    struct past p;
    int failed = open_past(&p, t, room);
    for (size_t i = 0; !failed && i < count; i++) {
        struct entry entry = found_then(&p, ids[i]);
        float *to = place_of(target, i, t->dim);
        if (has_row(&entry) && entry.place <= t->num_rows) {
            memcpy(to, row_then(&p, entry.place - 1), t->dim * sizeof(float));
        } else {
            mh_row_weights(rule, ids[i], to, t->dim);
        }
    }
    free(p.marks);
    return failed;
}
