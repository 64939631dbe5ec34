/* A digest that detects whether memory has changed: any single changed word changes it, and so do swapped words. It is
 * not cryptographic. Integers only, in a fixed number of lanes: the same on every CPU.
 * `parallel/replicas/fingerprint.py` has the same in Python. */
#include "core.h"

#include <string.h>

/* Some lanes, read unaligned: floats are read as words. */
#define LANES_AT_ONCE 4
typedef uint64_t words __attribute__((vector_size(LANES_AT_ONCE * sizeof(uint64_t)), aligned(1), may_alias));

#define GROUPS (MH_DIGEST_LANES / LANES_AT_ONCE)

/* Sums, and sums of the running sums, which depend on positions. Explicit vectors, as the compiler would not vectorise.
 * */
MH_FOR_THIS_CPU static void add_rows(struct mh_digest *digest, const words *row, size_t num_rows) {
    words sums[GROUPS], places[GROUPS];
    memcpy(sums, digest->sums, sizeof sums);
    memcpy(places, digest->places, sizeof places);
    for (; num_rows > 0; num_rows--, row += GROUPS) {
        for (size_t i = 0; i < GROUPS; i++) {
            sums[i] += row[i];
            places[i] += sums[i];
        }
    }
    memcpy(digest->sums, sums, sizeof sums);
    memcpy(digest->places, places, sizeof places);
}

void mh_digest_add(struct mh_digest *digest, const void *memory, size_t bytes) {
    const size_t row_bytes = MH_DIGEST_LANES * sizeof(uint64_t), num_rows = bytes / row_bytes, rest = bytes % row_bytes;
    add_rows(digest, memory, num_rows);
    if (rest) {
        uint64_t last[MH_DIGEST_LANES] = {0};
        memcpy(last, (const unsigned char *)memory + num_rows * row_bytes, rest);
        add_rows(digest, (const words *)last, 1);
    }
    digest->bytes += bytes;
}

/* Lanes are mixed independently of each other: a chain of dependent mixes would take longer than adding up a block. */
uint64_t mh_digest_end(const struct mh_digest *digest) {
    uint64_t whole = digest->bytes;
    for (uint64_t i = 0; i < MH_DIGEST_LANES; i++) {
        uint64_t lane = (digest->sums[i] + i) * 0x9e3779b97f4a7c15u;
        lane = (lane ^ lane >> 29 ^ digest->places[i]) * 0xbf58476d1ce4e5b9u;
        whole += lane ^ lane >> 32;
    }
    return whole;
}
