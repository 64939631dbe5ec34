/* Finding and changing rows; see rows.h for what is promised and row_table.h for how. */
#include "rows.h"
#include "core.h"
#include "row_table.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x3173776f72686dULL /* "mhrows1" */
#define LINE 64
#define BLOCK 32 /* ids whose memory is asked for at once, so that they are waited for together */

static size_t lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

size_t mh_rows_stride(uint32_t dim, uint32_t num_states) { return ((size_t)dim + num_states + 3) / 4 * 4; }

static struct table view(const void *memory, const struct mh_rows_room *room) {
    unsigned char *at = (unsigned char *)memory;
    struct table t = {.head = (struct head *)at, .stride = mh_rows_stride(room->dim, room->num_states)};
    t.num_slots = (room->rows + room->candidates) * 3 / 2 + 16; /* never more than two thirds full */
    t.record_bytes = sizeof(struct record) + t.stride * sizeof(float);
    at += lines(sizeof(struct head));
    for (int i = 0; i < 2; i++) {
        t.indexes[i] = (struct entry *)at;
        at += lines(t.num_slots * sizeof(struct entry));
    }
    t.free = (uint32_t *)at;
    at += lines(room->rows * sizeof(uint32_t));
    t.rows = (float *)at;
    at += lines(room->rows * t.stride * sizeof(float));
    t.journal = at;
    at += room->touched * t.record_bytes;
    t.bytes = (size_t)(at - (unsigned char *)memory);
    return t;
}

static struct table open_table(const void *memory) {
    struct table t = view(memory, &((const struct head *)memory)->room);
    t.state = t.head->states[t.head->current];
    t.index = t.indexes[t.state.index];
    return t;
}

size_t mh_rows_bytes(const struct mh_rows_room *room) { return view(NULL, room).bytes; }

size_t mh_rows_offset(const void *memory) {
    return (size_t)((unsigned char *)open_table(memory).rows - (unsigned char *)memory);
}

void mh_rows_format(void *memory, const struct mh_rows_room *room) {
    struct head *head = memory;
    head->room = *room;
    in_order();
    head->magic = MAGIC;
}

int mh_rows_read_room(const void *memory, size_t bytes, struct mh_rows_room *room) {
    const struct head *head = memory;
    if (bytes < sizeof *head || head->magic != MAGIC) return MH_BAD_ARGUMENT;
    *room = head->room;
    return mh_rows_bytes(room) > bytes ? MH_BAD_ARGUMENT : 0;
}

void mh_rows_count(const void *memory, struct mh_rows_count *count) {
    struct table t = open_table(memory);
    *count = (struct mh_rows_count){t.state.number, t.state.rows, t.state.candidates};
}

/* ---- the journal ---- */

static void begin_journal(struct table *t, uint64_t number) {
    t->head->journal_length = 0;
    in_order();
    t->head->journal_number = number;
    in_order();
}

/* Before the entry, or the row, is changed. */
static void remember(struct table *t, uint64_t slot, const struct entry *entry, uint64_t row) {
    unsigned char *at = t->journal + t->head->journal_length * t->record_bytes;
    struct record record = {slot, *entry, row};
    memcpy(at, &record, sizeof record);
    if (row != NOWHERE) memcpy(at + sizeof record, row_at(t, row), t->stride * sizeof(float));
    in_order();
    t->head->journal_length++;
    in_order();
}

int mh_rows_recover(void *memory) {
    struct table t = open_table(memory);
    if (t.head->journal_number <= t.state.number || t.head->journal_length == 0) return 0;
    for (uint64_t i = t.head->journal_length; i-- > 0;) {
        const unsigned char *at = t.journal + i * t.record_bytes;
        struct record record;
        memcpy(&record, at, sizeof record);
        if (record.row != NOWHERE) memcpy(row_at(&t, record.row), at + sizeof record, t.stride * sizeof(float));
        if (record.slot != NOWHERE) t.index[record.slot] = record.entry;
    }
    in_order();
    t.head->journal_length = 0;
    return 1;
}

static void commit(struct table *t, uint64_t number) {
    uint64_t other = t->head->current ^ 1;
    t->state.number = number;
    t->head->states[other] = t->state;
    in_order();
    t->head->current = other;
    in_order();
}

/* ---- finding ---- */

/* Asking for a block's entries, and then for its rows, before any is looked at: memory is waited for once per block. */
static void find(const struct table *t, const int64_t *ids, size_t count, struct spot *spots) {
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t end = start + BLOCK < count ? start + BLOCK : count;
        for (size_t i = start; i < end; i++) __builtin_prefetch(&t->index[home_of(t, ids[i])]);
        for (size_t i = start; i < end; i++) {
            size_t slot = slot_of(t, ids[i]);
            const struct entry *entry = &t->index[slot];
            spots[i] = (struct spot){entry->place ? slot : NOWHERE, has_row(entry) ? entry->place - 1 : NOWHERE};
        }
    }
}

static void ask_for_rows(const struct table *t, const struct spot *spots, size_t count, size_t floats) {
    for (size_t i = 0; i < count; i++) {
        if (spots[i].row == NOWHERE) continue;
        const float *row = row_at(t, spots[i].row);
        for (size_t j = 0; j < floats; j += LINE / sizeof(float)) __builtin_prefetch(row + j, 1);
    }
}

void mh_rows_lookup(const void *memory, const struct mh_rows_rule *rule, const int64_t *ids, size_t count, float *to) {
    struct table t = open_table(memory);
    uint32_t dim = t.head->room.dim;
    struct spot spots[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        find(&t, ids + start, length, spots);
        ask_for_rows(&t, spots, length, dim);
        for (size_t i = 0; i < length; i++) {
            float *row = to + (start + i) * dim;
            if (spots[i].row != NOWHERE) memcpy(row, row_at(&t, spots[i].row), dim * sizeof(float));
            else mh_row_weights(rule, ids[start + i], row, dim);
        }
    }
}

/* ---- changing ---- */

static struct need need_of(const struct table *t, const struct mh_rows_rule *rule, const struct spot *spots, size_t count) {
    struct need need = {0};
    for (size_t i = 0; i < count; i++) {
        if (spots[i].row != NOWHERE) continue;
        const struct entry *entry = spots[i].slot == NOWHERE ? NULL : &t->index[spots[i].slot];
        uint32_t seen = entry == NULL ? 0 : entry->place & ~MH_ROW_CANDIDATE;
        int is_admitted = seen + 1 >= rule->admit_after;
        need.rows += is_admitted;
        need.admitted += is_admitted && entry != NULL;
        need.candidates += !is_admitted && entry == NULL;
    }
    return need;
}

static uint64_t take_free_row(struct table *t) {
    t->state.rows++;
    return t->state.free ? t->free[--t->state.free] : t->state.fresh++;
}

struct touch {
    int64_t id;
    const float *gradient;
    float factor;
    uint32_t number;
    int in_journal; /* whether the index in use is the one that counts */
};

/* One id and its gradient: to its row, or to one that is made now, or counted only. */
static int touch(struct table *t, const struct mh_rows_rule *rule, const struct touch *one, size_t slot) {
    struct entry *entry = &t->index[slot];
    if (entry->place && entry->update == one->number) return MH_ROWS_TWICE;
    uint32_t dim = t->head->room.dim, seen = entry->place & ~MH_ROW_CANDIDATE, place = entry->place;
    int known = has_row(entry), is_made = !known && seen + 1 >= rule->admit_after;
    t->state.candidates -= is_made && entry->place;
    t->state.candidates += !known && !is_made && !entry->place;
    if (is_made) place = (uint32_t)take_free_row(t) + 1;
    else if (!known) place = MH_ROW_CANDIDATE | (seen + 1);
    uint64_t row = known || is_made ? place - 1 : NOWHERE;
    if (one->in_journal || row != NOWHERE) remember(t, one->in_journal ? slot : NOWHERE, entry, row);
    if (is_made) mh_row_start(rule, one->id, row_at(t, row), dim);
    if (row != NOWHERE) mh_row_change(rule, row_at(t, row), one->gradient, one->factor, dim);
    *entry = (struct entry){one->id, place, one->number};
    return 0;
}

static int touch_all(struct table *t, const struct mh_rows_rule *rule, struct touch one, const int64_t *ids,
                     const float *gradients, const struct spot *spots, size_t count) {
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t end = start + BLOCK < count ? start + BLOCK : count;
        for (size_t i = start; i < end; i++) {
            if (spots[i].slot != NOWHERE) __builtin_prefetch(&t->index[spots[i].slot], 1);
        }
        ask_for_rows(t, spots + start, end - start, t->stride);
        for (size_t i = start; i < end; i++) {
            one.id = ids[i];
            one.gradient = gradients + i * t->head->room.dim;
            int failed = touch(t, rule, &one, spots[i].slot == NOWHERE ? slot_of(t, ids[i]) : spots[i].slot);
            if (failed) return failed;
        }
    }
    return 0;
}

int mh_rows_update(void *memory, const struct mh_rows_rule *rule, uint64_t number, const int64_t *ids,
                   const float *gradients, size_t count, float factor, int may_evict, struct mh_rows_room *wanted) {
    struct table t = open_table(memory);
    *wanted = t.head->room;
    if (number <= t.state.number || number > UINT32_MAX) return MH_ROWS_OLD_NUMBER;
    wanted->touched = count;
    if (count > t.head->room.touched) return MH_ROWS_NO_ROOM;
    struct spot *spots = malloc((count + 1) * sizeof *spots);
    if (spots == NULL) return MH_NO_MEMORY;
    find(&t, ids, count, spots);
    struct need need = need_of(&t, rule, spots, count);
    wanted->rows = t.state.rows + need.rows;
    wanted->candidates = t.state.candidates - need.admitted + need.candidates;
    int swept = 0, failed = mh_rows_sweep(&t, rule, number, spots, count, &need, may_evict, &swept);
    if (!failed) {
        if (swept) find(&t, ids, count, spots);
        begin_journal(&t, number);
        struct touch one = {.factor = factor, .number = (uint32_t)number, .in_journal = !swept};
        failed = touch_all(&t, rule, one, ids, gradients, spots, count);
        if (failed) mh_rows_recover(memory);
        else commit(&t, number);
    }
    free(spots);
    return failed;
}

/* ---- all of it ---- */

void mh_rows_move(const void *from, void *to) {
    struct table a = open_table(from), b = open_table(to);
    b.state = a.state;
    b.state.index = 0;
    b.index = b.indexes[0];
    for (size_t slot = 0; slot < a.num_slots; slot++) {
        if (a.index[slot].place) b.index[slot_of(&b, a.index[slot].id)] = a.index[slot];
    }
    memcpy(b.free, a.free, a.state.free * sizeof *a.free);
    memcpy(b.rows, a.rows, a.state.fresh * a.stride * sizeof(float));
    commit(&b, a.state.number);
}

uint64_t mh_rows_digest(const void *memory, uint64_t turn, uint64_t turns) {
    struct table t = open_table(memory);
    uint64_t whole = mh_mix(t.state.number ^ mh_mix(t.state.rows));
    size_t floats = t.head->room.dim + t.head->room.num_states;
    for (size_t slot = 0; slot < t.num_slots; slot++) {
        const struct entry *entry = &t.index[slot];
        if (!entry->place || mh_mix((uint64_t)entry->id) % turns != turn) continue;
        uint64_t one = mh_mix((uint64_t)entry->id ^ mh_mix(entry->update));
        if (has_row(entry)) {
            struct mh_digest digest = {0};
            mh_digest_add(&digest, row_at(&t, entry->place - 1), floats * sizeof(float));
            one ^= mh_digest_end(&digest);
        } else {
            one ^= entry->place;
        }
        whole += mh_mix(one); /* in any order */
    }
    return whole;
}

void mh_rows_list(const void *memory, int64_t *ids, uint32_t *places, uint32_t *updates) {
    struct table t = open_table(memory);
    size_t found = 0;
    for (size_t slot = 0; slot < t.num_slots; slot++) {
        const struct entry *entry = &t.index[slot];
        if (!entry->place) continue;
        ids[found] = entry->id;
        places[found] = has_row(entry) ? entry->place - 1 : entry->place;
        updates[found++] = entry->update;
    }
}

void mh_rows_fill(void *memory, uint64_t number, const int64_t *ids, const uint32_t *places, const uint32_t *updates,
                  size_t count) {
    struct table t = open_table(memory);
    for (size_t i = 0; i < count; i++) {
        int is_row = !(places[i] & MH_ROW_CANDIDATE);
        uint32_t place = is_row ? (uint32_t)++t.state.fresh : places[i];
        t.index[slot_of(&t, ids[i])] = (struct entry){ids[i], place, updates[i]};
        t.state.rows += (uint64_t)is_row;
        t.state.candidates += (uint64_t)!is_row;
    }
    commit(&t, number);
}
