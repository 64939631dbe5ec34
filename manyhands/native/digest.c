/* A number that tells whether memory has changed: any one word that changes changes it, and so do words that change
 * places. It is no defence against somebody who wants two contents to have the same. Integers only, in lanes of a fixed
 * number: the same on every CPU. `parallel/fingerprint.py` has the same in Python. */
#include "core.h"

#include <string.h>

/* Read as it lies: floats are looked at as words, and nothing need be aligned. */
typedef uint64_t __attribute__((aligned(1), may_alias)) word;

/* Sums, and sums of the sums so far, which tell places apart. */
MH_FOR_THIS_CPU static void add_rows(struct mh_digest *digest, const word *words, size_t num_rows) {
    uint64_t sums[MH_DIGEST_LANES], places[MH_DIGEST_LANES];
    memcpy(sums, digest->sums, sizeof sums);
    memcpy(places, digest->places, sizeof places);
    for (size_t row = 0; row < num_rows; row++, words += MH_DIGEST_LANES) {
        for (size_t i = 0; i < MH_DIGEST_LANES; i++) {
            sums[i] += words[i];
            places[i] += sums[i];
        }
    }
    memcpy(digest->sums, sums, sizeof sums);
    memcpy(digest->places, places, sizeof places);
}

void mh_digest_add(struct mh_digest *digest, const void *memory, size_t bytes) {
    const size_t row_bytes = MH_DIGEST_LANES * sizeof(word), num_rows = bytes / row_bytes, rest = bytes % row_bytes;
    add_rows(digest, memory, num_rows);
    if (rest) {
        word last[MH_DIGEST_LANES] = {0};
        memcpy(last, (const unsigned char *)memory + num_rows * row_bytes, rest);
        add_rows(digest, last, 1);
    }
    digest->bytes += bytes;
}

uint64_t mh_digest_end(const struct mh_digest *digest) {
    uint64_t whole = digest->bytes;
    for (size_t i = 0; i < MH_DIGEST_LANES; i++) {
        whole = (whole ^ digest->sums[i]) * 0x9e3779b97f4a7c15u;
        whole ^= whole >> 29;
        whole = (whole ^ digest->places[i]) * 0xbf58476d1ce4e5b9u;
        whole ^= whole >> 32;
    }
    return whole;
}
