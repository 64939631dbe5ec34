/* Large copies, past the caches: what they replace is not read, and what others need is not pushed out. */
#include "core.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64

void mh_copy(void *to, const void *from, size_t bytes) {
    unsigned char *target = to;
    const unsigned char *source = from;
#ifdef __SSE2__
    _mm_sfence(); /* whoever sees some of the copy sees what was written before it */
    size_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    if (head > bytes) head = bytes;
    memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= LINE; target += LINE, source += LINE, bytes -= LINE) {
        for (size_t i = 0; i < LINE; i += 16) {
            _mm_stream_si128((__m128i *)(target + i), _mm_loadu_si128((const __m128i *)(source + i)));
        }
    }
    _mm_sfence(); /* whoever sees what this thread writes next sees the copy */
#endif
    memcpy(target, source, bytes);
}
