/* Barriers and collectives in shared memory. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define PAGE 4096
/* A rank spins for this long on a later rank, then sleeps in the kernel. */
#define SPIN_NS 20000
/* The futex word is not the abort flag, so a sleeper wakes up now and then to check the flag. */
#define NAP_NS 20000000
/* Up to this size every rank adds everything itself, which needs one barrier instead of two. */
#define SMALL_BYTES 16384

typedef unsigned char byte;

struct slot {
    _Alignas(LINE) _Atomic uint32_t arrived;
    _Atomic uint32_t posted;
    _Atomic uint32_t sleepers; /* on either counter */
    /* Of the last two barriers: ranks that have not left the one before may still read its purposes. */
    _Alignas(LINE) struct mh_purpose purposes[2];
};

struct header {
    _Alignas(LINE) _Atomic uint32_t aborted; /* 0, or 1 + the rank that was lost */
    struct slot slots[];
};

static size_t header_bytes(uint32_t world) {
    size_t bytes = sizeof(struct header) + world * sizeof(struct slot);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

size_t mh_plane_bytes(uint32_t world, size_t area_bytes) { return header_bytes(world) + 2 * (size_t)world * area_bytes; }

int mh_plane_open(struct mh_plane *plane, void *base, size_t bytes, uint32_t rank, uint32_t world, size_t area_bytes) {
    if (base == NULL || world == 0 || rank >= world || area_bytes == 0 || area_bytes % (world * LINE)) {
        return MH_BAD_ARGUMENT;
    }
    if (bytes < mh_plane_bytes(world, area_bytes)) return MH_BAD_ARGUMENT;
    *plane = (struct mh_plane){.base = base, .rank = rank, .world = world, .area_bytes = area_bytes};
    return 0;
}

static struct header *header_of(const struct mh_plane *plane) { return (struct header *)plane->base; }

/* Two areas per rank, used in turn: before a rank refills one, a barrier has passed since the others read it. */
static byte *area_of(const struct mh_plane *plane, uint32_t rank) {
    size_t number = (size_t)(plane->turns & 1) * plane->world + rank;
    return plane->base + header_bytes(plane->world) + number * plane->area_bytes;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static void sleep_on(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    struct timespec limit = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void mh_abort(void *base, uint32_t world, uint32_t rank) {
    struct header *header = base;
    uint32_t not_aborted = 0;
    atomic_compare_exchange_strong(&header->aborted, &not_aborted, rank + 1);
    for (uint32_t rank = 0; rank < world; rank++) {
        wake(&header->slots[rank].arrived);
        wake(&header->slots[rank].posted);
    }
}

int64_t mh_lost_rank(const void *base) {
    const struct header *header = base;
    return (int64_t)atomic_load(&header->aborted) - 1;
}

/* Counters wrap after 2^32; no rank is ever half of that ahead. */
static int has_come(uint32_t counted, uint32_t wanted) { return (int32_t)(counted - wanted) >= 0; }

/* `counter` is one of the slot's counters. */
static int wait_for(struct header *header, struct slot *slot, _Atomic uint32_t *counter, uint32_t wanted,
                    int64_t deadline) {
    int64_t spin_until = 0;
    for (uint32_t turn = 0;; turn++) {
        uint32_t counted = atomic_load_explicit(counter, memory_order_acquire);
        if (has_come(counted, wanted)) return 0;
        if (atomic_load_explicit(&header->aborted, memory_order_relaxed)) return MH_ABORTED;
        if (turn % 64) {
            pause_briefly();
            continue;
        }
        int64_t now = now_ns();
        if (spin_until == 0) spin_until = now + SPIN_NS;
        if (now >= deadline) return MH_MISSING;
        if (now < spin_until) continue;
        int64_t nap = deadline - now < NAP_NS ? deadline - now : NAP_NS;
        atomic_fetch_add(&slot->sleepers, 1);
        sleep_on(counter, counted, nap); /* returns at once if it has changed meanwhile */
        atomic_fetch_sub(&slot->sleepers, 1);
    }
}

/* The store precedes the load of `sleepers` (sequentially consistent): a rank about to sleep sees it, or is seen. */
static void count_up(struct slot *slot, _Atomic uint32_t *counter, uint32_t to) {
    atomic_store(counter, to);
    if (atomic_load(&slot->sleepers)) wake(counter);
}

static _Atomic uint32_t *counter_of(struct slot *slot, int of_posts) { return of_posts ? &slot->posted : &slot->arrived; }

static int wait_for_all(struct mh_plane *plane, int of_posts, uint32_t wanted, int64_t timeout_ns) {
    struct header *header = header_of(plane);
    int64_t deadline = now_ns() + timeout_ns;
    for (uint32_t step = 1; step < plane->world; step++) {
        uint32_t rank = (plane->rank + step) % plane->world;
        struct slot *slot = &header->slots[rank];
        int found = wait_for(header, slot, counter_of(slot, of_posts), wanted, deadline);
        if (found == MH_MISSING) {
            mh_abort(plane->base, plane->world, rank);
            return MH_MISSING + (int)rank;
        }
        if (found) return found;
    }
    return 0;
}

void mh_set_purpose(struct mh_plane *plane, const char *text, size_t length) {
    plane->purpose = (struct mh_purpose){.length = (uint32_t)length};
    memcpy(plane->purpose.text, text, length < MH_PURPOSE_BYTES ? length : MH_PURPOSE_BYTES);
}

const struct mh_purpose *mh_purpose_of(const struct mh_plane *plane, uint32_t rank) {
    return &header_of(plane)->slots[rank].purposes[plane->barriers & 1];
}

static int check_purposes(const struct mh_plane *plane) {
    for (uint32_t rank = 0; rank < plane->world; rank++) {
        if (memcmp(mh_purpose_of(plane, rank), &plane->purpose, sizeof plane->purpose)) return MH_UNLIKE;
    }
    return 0;
}

/* A barrier that every rank has entered succeeds, even if a rank was lost since. */
int mh_meet(struct mh_plane *plane, int64_t timeout_ns) {
    struct slot *mine = &header_of(plane)->slots[plane->rank];
    uint32_t barrier = ++plane->barriers;
    mine->purposes[barrier & 1] = plane->purpose;
    count_up(mine, &mine->arrived, barrier);
    int failed = wait_for_all(plane, 0, barrier, timeout_ns);
    return failed ? failed : check_purposes(plane);
}

void mh_post(struct mh_plane *plane, uint32_t number) {
    struct slot *mine = &header_of(plane)->slots[plane->rank];
    count_up(mine, &mine->posted, number);
}

int mh_all_posted(const struct mh_plane *plane, uint32_t number) {
    struct header *header = header_of(plane);
    for (uint32_t rank = 0; rank < plane->world; rank++) {
        uint32_t posted = atomic_load_explicit(&header->slots[rank].posted, memory_order_acquire);
        if (!has_come(posted, number)) return 0;
    }
    return 1;
}

int mh_wait_posted(struct mh_plane *plane, uint32_t number, int64_t timeout_ns) {
    return wait_for_all(plane, 1, number, timeout_ns);
}

/* Where part `part` of `count` elements begins: parts start on a cache line, so that no two ranks write to one. */
static size_t part_start(size_t count, size_t item, uint32_t part, uint32_t world) {
    size_t lines = (count * item + LINE - 1) / LINE;
    size_t start = lines * part / world * LINE / item;
    return start < count ? start : count;
}

static int sum_of_areas(const struct mh_plane *plane, void *target, size_t start, size_t count, int dtype,
                        const int32_t *program, size_t length) {
    const void *sources[plane->world];
    for (uint32_t rank = 0; rank < plane->world; rank++) {
        sources[rank] = area_of(plane, rank) + start * mh_item_bytes(dtype);
    }
    return mh_sum(target, sources, program, length, count, dtype);
}

/* At most one area's bytes: from `data` to this rank's area, and the sum back to `data`. */
static int all_reduce_once(struct mh_plane *plane, byte *data, size_t count, int dtype, const int32_t *program,
                           size_t length, int64_t timeout_ns) {
    size_t item = mh_item_bytes(dtype);
    plane->turns++;
    byte *own = area_of(plane, plane->rank);
    memcpy(own, data, count * item);
    int failed = mh_meet(plane, timeout_ns);
    if (failed) return failed;
    if (count * item <= SMALL_BYTES || plane->world == 1) {
        return sum_of_areas(plane, data, 0, count, dtype, program, length);
    }
    size_t start = part_start(count, item, plane->rank, plane->world);
    size_t stop = part_start(count, item, plane->rank + 1, plane->world);
    failed = sum_of_areas(plane, own + start * item, start, stop - start, dtype, program, length);
    if (!failed) failed = mh_meet(plane, timeout_ns);
    if (failed) return failed;
    for (uint32_t rank = 0; rank < plane->world; rank++) {
        start = part_start(count, item, rank, plane->world);
        stop = part_start(count, item, rank + 1, plane->world);
        memcpy(data + start * item, area_of(plane, rank) + start * item, (stop - start) * item);
    }
    return 0;
}

int mh_all_reduce(struct mh_plane *plane, void *data, size_t count, int dtype, const int32_t *program, size_t length,
                  int64_t timeout_ns) {
    size_t item = mh_item_bytes(dtype);
    if (item == 0 || mh_check_program(program, length, plane->world)) return MH_BAD_ARGUMENT;
    size_t room = plane->area_bytes / item;
    for (size_t start = 0; start < count; start += room) {
        size_t here = count - start < room ? count - start : room;
        int failed = all_reduce_once(plane, (byte *)data + start * item, here, dtype, program, length, timeout_ns);
        if (failed) return failed;
    }
    return 0;
}

int mh_reduce_scatter(struct mh_plane *plane, void *output, const void *input, size_t count, int dtype,
                      const int32_t *program, size_t length, int64_t timeout_ns) {
    size_t item = mh_item_bytes(dtype);
    if (item == 0 || mh_check_program(program, length, plane->world)) return MH_BAD_ARGUMENT;
    size_t room = plane->area_bytes / plane->world / item;
    for (size_t start = 0; start < count; start += room) {
        size_t here = count - start < room ? count - start : room;
        plane->turns++;
        for (uint32_t rank = 0; rank < plane->world; rank++) {
            const byte *part = (const byte *)input + (rank * count + start) * item;
            memcpy(area_of(plane, plane->rank) + rank * room * item, part, here * item);
        }
        int failed = mh_meet(plane, timeout_ns);
        byte *to = (byte *)output + start * item;
        if (!failed) failed = sum_of_areas(plane, to, plane->rank * room, here, dtype, program, length);
        if (failed) return failed;
    }
    return 0;
}

int mh_all_gather(struct mh_plane *plane, void *output, const void *input, size_t bytes, int64_t timeout_ns) {
    for (size_t start = 0; start < bytes; start += plane->area_bytes) {
        size_t here = bytes - start < plane->area_bytes ? bytes - start : plane->area_bytes;
        plane->turns++;
        memcpy(area_of(plane, plane->rank), (const byte *)input + start, here);
        int failed = mh_meet(plane, timeout_ns);
        if (failed) return failed;
        for (uint32_t rank = 0; rank < plane->world; rank++) {
            memcpy((byte *)output + rank * bytes + start, area_of(plane, rank), here);
        }
    }
    return 0;
}

int mh_broadcast(struct mh_plane *plane, void *data, size_t bytes, uint32_t source, int64_t timeout_ns) {
    if (source >= plane->world) return MH_BAD_ARGUMENT;
    for (size_t start = 0; start < bytes; start += plane->area_bytes) {
        size_t here = bytes - start < plane->area_bytes ? bytes - start : plane->area_bytes;
        plane->turns++;
        if (plane->rank == source) memcpy(area_of(plane, source), (byte *)data + start, here);
        int failed = mh_meet(plane, timeout_ns);
        if (failed) return failed;
        if (plane->rank != source) memcpy((byte *)data + start, area_of(plane, source), here);
    }
    return 0;
}
