/* What the ranks of one host do together, by way of memory that they share.
 *
 * A rank has a line, on which it tells how far it is, and two buffers, which it alone writes. A
 * collective goes in pieces of a buffer's size. For piece n a rank fills buffer n % 2, sets its
 * sequence to n, waits for the sequences of those it reads from, and reads. Before it fills a
 * buffer again, all have begun with the piece between, so nobody reads it any more. Numbers of
 * pieces wrap around.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "waiting.h"

#define MAX_RANKS 64
#define PAGE 4096
#define BLOCK 1024             /* numbers that are added at a time, in the first-level cache */
#define LOOKS 16               /* at a sequence, between two looks at the clock */
#define NAP_NS 100000000       /* until a sleeper looks whether the other rank is still there */
#define FIRST (UINT32_MAX - 99) /* so that every group sees the numbers wrap around */

enum { ALL_REDUCE, ALL_GATHER, GATHER, BROADCAST };      /* as in shared_memory.py */
enum { FLOAT32, BFLOAT16, FLOAT16 };                     /* as in shared_memory.py */
enum { DONE, CLOSED, LEFT, DIED, DIFFERENT, NO_SUM };    /* as in shared_memory.py */

/* Mirrored by shared_memory.py, as is `session`. */
typedef struct {
    int32_t kind, dtype;
    int64_t bytes, row_bytes; /* of each rank's part */
} call;

typedef struct {
    uint32_t sequence, sleepers, has_left;
    call calls[2]; /* what the pieces in its buffers are of */
} __attribute__((aligned(128))) line;

typedef struct {
    void *memory;
    int64_t buffer_bytes, spin_ns;
    int32_t descriptor, rank, size, root;
    uint32_t sequence; /* of the last piece that this rank is through with */
    int32_t failed;    /* on failure: the rank that it is about, and the two calls */
    call own, other;
} session;

static line *line_of(const session *s, int rank) { return (line *)s->memory + rank; }

static int64_t lines_bytes(int size) { return ((int64_t)size * sizeof(line) + PAGE - 1) / PAGE * PAGE; }

static uint8_t *buffer(const session *s, int rank, uint32_t piece) {
    int64_t place = 2 * rank + (piece & 1);
    return (uint8_t *)s->memory + lines_bytes(s->size) + place * s->buffer_bytes;
}

static inline int is_through(const line *l, uint32_t piece) {
    return (int32_t)(__atomic_load_n(&l->sequence, __ATOMIC_ACQUIRE) - piece) >= 0;
}

static int has_left(const line *l) { return __atomic_load_n(&l->has_left, __ATOMIC_ACQUIRE); }

/* The lock of a rank's byte goes with its open file, however its process ends. */
static struct flock lock_of(int rank) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

static int is_alive(const session *s, int rank) {
    struct flock lock = lock_of(rank);
    return fcntl(s->descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static void wake(line *l) { syscall(SYS_futex, &l->sequence, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Waits until the rank has filled its buffer for a piece. */
static int wait_for(const session *s, int rank, uint32_t piece) {
    const struct timespec nap = {.tv_nsec = NAP_NS};
    line *theirs = line_of(s, rank);
    int64_t until = 0;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (is_through(theirs, piece)) return DONE;
            relax();
        }
        if (!until) until = now_ns() + s->spin_ns;
    } while (now_ns() < until);
    int outcome = -1;
    __atomic_fetch_add(&theirs->sleepers, 1, __ATOMIC_SEQ_CST);
    while (outcome < 0) {
        /* Before the sequence: who is gone may have filled the buffer first. */
        int is_gone = has_left(theirs) ? LEFT : is_alive(s, rank) ? DONE : DIED;
        uint32_t seen = __atomic_load_n(&theirs->sequence, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - piece) >= 0)
            outcome = DONE;
        else if (has_left(line_of(s, s->rank)))
            outcome = CLOSED;
        else if (is_gone)
            outcome = is_gone;
        else
            syscall(SYS_futex, &theirs->sequence, FUTEX_WAIT, seen, &nap, NULL, 0);
    }
    __atomic_fetch_sub(&theirs->sleepers, 1, __ATOMIC_SEQ_CST);
    return outcome;
}

/* Waits, and sees that the rank does the same as this one. */
static int meet(session *s, int rank, uint32_t piece) {
    int outcome = wait_for(s, rank, piece);
    if (outcome == DONE) {
        s->own = line_of(s, s->rank)->calls[piece & 1];
        s->other = line_of(s, rank)->calls[piece & 1];
        if (memcmp(&s->own, &s->other, sizeof(call))) outcome = DIFFERENT;
    }
    s->failed = rank;
    return outcome;
}

static void publish(session *s, uint32_t piece, const call *c) {
    line *own = line_of(s, s->rank);
    own->calls[piece & 1] = *c;
    /* A sleeper counts itself before it looks at the sequence, which is set before the look here. */
    __atomic_store_n(&own->sequence, piece, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->sleepers, __ATOMIC_SEQ_CST)) wake(own);
    s->sequence = piece;
}

static inline float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float same(float number) { return number; }

static inline float from_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* To the nearest, of two the even one; what is no number stays none. */
static inline uint16_t to_bfloat16(float number) {
    uint32_t bits = to_bits(number);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return number != number ? 0x7fc0 : rounded;
}

static inline float from_float16(uint16_t half) {
    uint32_t rest = (half & 0x7fff) << 13;
    float finite = from_bits(rest) * 0x1p112f; /* the exponent's bias is 127, not 15 */
    uint32_t bits = rest >= 0x0f800000 ? rest | 0x7f800000 : to_bits(finite);
    return from_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t to_float16(float number) {
    uint32_t bits = to_bits(number), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    /* A number as large as 0.5 has the least float16 as its last bit: the sum is rounded there. */
    uint32_t small = to_bits(from_bits(size) + 0.5f) - 0x3f000000;
    uint32_t half = size < 0x38800000 ? small : normal;
    half = size >= 0x477ff000 ? 0x7c00 : half; /* rounds to infinity */
    return sign | (size > 0x7f800000 ? 0x7e00 : half);
}

/* Adds in the order of ranks, in float, and rounds once: so all ranks get the same bits. */
#define DEFINE_SUM(name, number, widen, narrow)                                                 \
    static void name(const void *const *parts, int size, void *sum, int64_t count) {            \
        for (int64_t start = 0; start < count; start += BLOCK) {                                \
            int length = count - start < BLOCK ? count - start : BLOCK;                         \
            float total[BLOCK];                                                                 \
            const number *part = (const number *)parts[0] + start;                              \
            for (int i = 0; i < length; i++) total[i] = widen(part[i]);                         \
            for (int rank = 1; rank < size; rank++) {                                           \
                part = (const number *)parts[rank] + start;                                     \
                for (int i = 0; i < length; i++) total[i] += widen(part[i]);                    \
            }                                                                                   \
            number *to = (number *)sum + start;                                                 \
            for (int i = 0; i < length; i++) to[i] = narrow(total[i]);                          \
        }                                                                                       \
    }

DEFINE_SUM(sum_float32, float, same, same)
DEFINE_SUM(sum_bfloat16_plainly, uint16_t, from_bfloat16, to_bfloat16)
DEFINE_SUM(sum_float16, uint16_t, from_float16, to_float16)

typedef float vec __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef words loose_words __attribute__((aligned(2), may_alias));

static inline words round_bfloat16(vec numbers) {
    words bits = (words)numbers, is_nan = (words)(numbers != numbers);
    bits = bits + 0x7fff + (bits >> 16 & 1);
    return (bits & ~is_nan) | (is_nan & 0x7fc00000);
}

/* Numbers stay in the halves of their words, so that nothing is packed: a third faster. */
static void sum_bfloat16(const void *const *parts, int size, void *sum, int64_t count) {
    int64_t done = 0, step = sizeof(words) / sizeof(uint16_t);
    for (; done + step <= count; done += step) {
        vec low = {0}, high = {0};
        for (int rank = 0; rank < size; rank++) {
            words pairs = *(const loose_words *)((const uint16_t *)parts[rank] + done);
            vec even = (vec)(pairs << 16), odd = (vec)(pairs & 0xffff0000);
            low = rank ? low + even : even; /* 0 + -0 would be 0 */
            high = rank ? high + odd : odd;
        }
        words joined = round_bfloat16(low) >> 16 | (round_bfloat16(high) & 0xffff0000);
        *(loose_words *)((uint16_t *)sum + done) = joined;
    }
    const void *rests[MAX_RANKS];
    for (int rank = 0; rank < size; rank++) rests[rank] = (const uint16_t *)parts[rank] + done;
    sum_bfloat16_plainly(rests, size, (uint16_t *)sum + done, count - done);
}

/* Puts bytes [start, start + bytes) of a rank's rows where they are in the joined rows. */
static void place(
    uint8_t *joined, const uint8_t *part, int rank, int size, const call *c, int64_t start, int64_t bytes
) {
    for (int64_t at = start, end = start + bytes; at < end;) {
        int64_t row = at / c->row_bytes, column = at % c->row_bytes;
        int64_t length = c->row_bytes - column < end - at ? c->row_bytes - column : end - at;
        memcpy(joined + (row * size + rank) * c->row_bytes + column, part + at - start, length);
        at += length;
    }
}

static void receive(
    const session *s, const call *c, const uint8_t *input, uint8_t *output, int64_t start, int64_t bytes
) {
    const void *parts[MAX_RANKS];
    for (int rank = 0; rank < s->size; rank++)
        parts[rank] = rank == s->rank ? input + start : buffer(s, rank, s->sequence);
    if (c->kind == BROADCAST)
        memcpy(output + start, parts[s->root], bytes);
    else if (c->kind != ALL_REDUCE)
        for (int rank = 0; rank < s->size; rank++)
            place(output, parts[rank], rank, s->size, c, start, bytes);
    else if (c->dtype == FLOAT32)
        sum_float32(parts, s->size, output + start, bytes / 4);
    else if (c->dtype == BFLOAT16)
        sum_bfloat16(parts, s->size, output + start, bytes / 2);
    else
        sum_float16(parts, s->size, output + start, bytes / 2);
}

/* One collective. A sum may be written over the input; a broadcast is. */
int exchange(session *s, const call *c, const uint8_t *input, uint8_t *output) {
    int is_root = s->rank == s->root;
    int sends = c->kind == ALL_REDUCE || c->kind == ALL_GATHER || (c->kind == GATHER) != is_root;
    int receives = c->kind == ALL_REDUCE || c->kind == ALL_GATHER || (c->kind == GATHER) == is_root;
    if (c->kind == ALL_REDUCE && (c->dtype < FLOAT32 || c->dtype > FLOAT16)) return NO_SUM;
    if (has_left(line_of(s, s->rank))) return CLOSED;
    int64_t start = 0;
    do { /* once at least, so that ranks with nothing to say meet, too */
        int64_t bytes = c->bytes - start < s->buffer_bytes ? c->bytes - start : s->buffer_bytes;
        uint32_t last = s->sequence, piece = last + 1;
        int outcome;
        for (int rank = 0; rank < s->size; rank++)
            if (rank != s->rank && (outcome = meet(s, rank, last))) return outcome;
        if (sends && bytes) memcpy(buffer(s, s->rank, piece), input + start, bytes);
        publish(s, piece, c);
        for (int rank = 0; receives && rank < s->size; rank++)
            if (rank != s->rank && (c->kind != BROADCAST || rank == s->root))
                if ((outcome = meet(s, rank, piece))) return outcome;
        if (receives && bytes) receive(s, c, input, output, start, bytes);
        start += bytes;
    } while (start < c->bytes);
    return DONE;
}

/* Takes this rank's lock; the first rank, which is there before the others, makes the lines ready.
 * Returns 0 or errno. */
int enter(session *s) {
    struct flock lock = lock_of(s->rank);
    if (fcntl(s->descriptor, F_OFD_SETLK, &lock)) return errno;
    s->sequence = FIRST;
    if (s->rank == 0)
        for (int rank = 0; rank < s->size; rank++) line_of(s, rank)->sequence = FIRST;
    return 0;
}

/* Ends this rank's waiting, and that of others for it. Any thread may call it. */
void leave(session *s) {
    __atomic_store_n(&line_of(s, s->rank)->has_left, 1, __ATOMIC_RELEASE);
    for (int rank = 0; rank < s->size; rank++) wake(line_of(s, rank));
}

/* What the caller must know. */
int64_t memory_bytes(int size, int64_t buffer_bytes) { return lines_bytes(size) + 2 * size * buffer_bytes; }

int64_t session_bytes(void) { return sizeof(session); }

int max_ranks(void) { return MAX_RANKS; }
