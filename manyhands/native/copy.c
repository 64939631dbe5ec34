/* Large copies that bypass the caches: the target is not read first, and no other data is evicted. */
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
    _mm_sfence(); /* a thread that sees part of the copy also sees earlier writes */
    size_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    if (head > bytes) head = bytes;
    memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= LINE; target += LINE, source += LINE, bytes -= LINE) {
        for (size_t i = 0; i < LINE; i += 16) {
            _mm_stream_si128((__m128i *)(target + i), _mm_loadu_si128((const __m128i *)(source + i)));
        }
    }
    _mm_sfence(); /* a thread that sees later writes also sees the copy */
#endif
    memcpy(target, source, bytes);
}
