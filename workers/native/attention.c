/* One attention call of a step over the paged KV cache, on a CPU.
 *
 * Compiled twice from this file, for float and for bfloat16 numbers (-DBFLOAT16). Everything is
 * computed in float. A work item is a tile of one sequence's queries, for one KV head: the query
 * heads that share it are rows of the same tile, so that keys and values are read once for them.
 * Softmax is online (Milakov and Gimelshein: Online normalizer calculation for softmax).
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define KEYS LANES   /* of a group: one vector of scores */
#define MAX_ROWS 48  /* of a tile: queries times heads; heads alone may be more */
#define MAX_HEADS 128
#define MAX_DIM 512

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t int_vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_vec __attribute__((vector_size(4 * LANES)));

#ifdef BFLOAT16
typedef uint16_t number;
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline vec load(const number *from) {
    half_vec halves = *(const half_vec *)from;
    return (vec)(__builtin_convertvector(halves, bits_vec) << 16);
}

static inline void store(number *to, vec numbers) {
    bits_vec bits = (bits_vec)numbers;
    /* To the nearest, of two the even one; what is no number stays none. */
    bits_vec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits_vec is_nan = (bits_vec)(numbers != numbers);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
    *(half_vec *)to = __builtin_convertvector(rounded, half_vec);
}
#else
typedef float number;

static inline vec load(const number *from) { return *(const loose_vec *)from; }

static inline void store(number *to, vec numbers) { *(loose_vec *)to = numbers; }
#endif

/* Mirrored by workers/attention/native.py. Strides count numbers. */
typedef struct {
    const number *query, *key, *value;
    number *key_cache, *value_cache, *output;
    const float *sinks;
    const int32_t *seq_lens, *query_starts, *block_tables, *first_blocks;
    const int64_t *slot_blocks, *slot_offsets;
    const int32_t *items; /* [num_items, 2]: sequence, first query of the tile */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t key_block, key_slot, key_cache_head, value_block, value_slot, value_cache_head;
    int64_t table_stride;
    int32_t num_tokens, num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int32_t num_items, tile_queries, window, chunk, num_threads;
    float scale, softcap;
    void *workspaces; /* one for each thread, from a multiple of 64 bytes on */
} arguments;

static inline vec splat(float number) { return (vec){0} + number; }

static inline vec choose(int_vec mask, vec yes, vec no) {
    return (vec)((mask & (int_vec)yes) | (~mask & (int_vec)no));
}

static inline vec larger(vec one, vec other) { return choose(one > other, one, other); }

/* e^x for x <= 0: 2^n times a polynomial of the rest, within 2 units in the last place. */
static inline vec exponential(vec x) {
    int_vec is_zero = x < -87.0f;
    x = choose(is_zero, splat(-87.0f), x);
    vec scaled = x * 1.44269504f;
    int_vec whole = __builtin_convertvector(scaled - 0.5f, int_vec); /* towards 0, x <= 0 */
    vec n = __builtin_convertvector(whole, vec);
    vec rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    vec power = (vec)((whole + 127) << 23);
    return choose(is_zero, splat(0.0f), p * power);
}

/* Lanes of two vectors by turns: what is left of them when neighbours are added up. */
#if LANES == 16
#define SWAP_8 (int_vec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}
#define SWAP_4 (int_vec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}
#define SWAP_2 (int_vec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}
#define SWAP_1 (int_vec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}
#define LANES_8 {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}
#define LANES_4 {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}
#define LANES_2 {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}
#define LANES_1 {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define SWAP_4 (int_vec){4, 5, 6, 7, 0, 1, 2, 3}
#define SWAP_2 (int_vec){2, 3, 0, 1, 6, 7, 4, 5}
#define SWAP_1 (int_vec){1, 0, 3, 2, 5, 4, 7, 6}
#define LANES_4 {0, 1, 2, 3, 8, 9, 10, 11}
#define LANES_2 {0, 1, 4, 5, 8, 9, 12, 13}
#define LANES_1 {0, 2, 4, 6, 8, 10, 12, 14}
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7}
#endif

static inline float largest(vec numbers) {
#if LANES == 16
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_8));
#endif
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_4));
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_2));
    numbers = larger(numbers, __builtin_shuffle(numbers, SWAP_1));
    return numbers[0];
}

static inline float sum(vec numbers) {
#if LANES == 16
    numbers += __builtin_shuffle(numbers, SWAP_8);
#endif
    numbers += __builtin_shuffle(numbers, SWAP_4);
    numbers += __builtin_shuffle(numbers, SWAP_2);
    numbers += __builtin_shuffle(numbers, SWAP_1);
    return numbers[0];
}

/* Joins halves: lane i of the result is the sum of two lanes of `one`, or of `other`. */
#define JOIN(one, other, lanes, apart) \
    (__builtin_shuffle(one, other, (int_vec)lanes) + \
     __builtin_shuffle(one, other, (int_vec)lanes + apart))

/* Lane i of the result is the sum of part i's lanes. */
static inline vec sums(vec part[KEYS]) {
#if LANES == 16
    for (int i = 0; i < 8; i++) part[i] = JOIN(part[2 * i], part[2 * i + 1], LANES_8, 8);
#endif
    for (int i = 0; i < 4; i++) part[i] = JOIN(part[2 * i], part[2 * i + 1], LANES_4, 4);
    for (int i = 0; i < 2; i++) part[i] = JOIN(part[2 * i], part[2 * i + 1], LANES_2, 2);
    return JOIN(part[0], part[1], LANES_1, 1);
}

/* Scores of one row and a group of keys. */
static inline vec products(const float *query, const float *keys, int dim) {
    vec part[KEYS];
    for (int k = 0; k < KEYS; k++) part[k] = splat(0.0f);
    for (int d = 0; d < dim; d += LANES) {
        vec here = *(const vec *)(query + d);
        for (int k = 0; k < KEYS; k++) part[k] += here * *(const vec *)(keys + k * dim + d);
    }
    return sums(part);
}

/* A thread's room for one tile. */
typedef struct {
    float query[MAX_ROWS > MAX_HEADS ? MAX_ROWS : MAX_HEADS][MAX_DIM];
    float output[MAX_ROWS > MAX_HEADS ? MAX_ROWS : MAX_HEADS][MAX_DIM];
    float most[MAX_HEADS], total[MAX_HEADS];
    float keys[KEYS * MAX_DIM], values[KEYS * MAX_DIM];
} __attribute__((aligned(64))) workspace;

/* Place of the first key that the query at `position` sees. */
static inline int32_t first_seen(const arguments *a, int32_t position) {
    if (a->chunk) return position / a->chunk * a->chunk;
    return a->window && position + 1 > a->window ? position + 1 - a->window : 0;
}

static void read_group(
    const arguments *a, workspace *w, int32_t sequence, int head, int32_t start, int count
) {
    const int32_t *table = a->block_tables + sequence * a->table_stride;
    int32_t first_block = a->first_blocks[sequence];
    for (int k = 0; k < KEYS; k++) {
        /* Past the end the last one is read again: its score is masked. */
        int32_t position = start + (k < count ? k : count - 1);
        int64_t block = table[position / a->block_size - first_block];
        int64_t slot = position % a->block_size;
        const number *key =
            a->key_cache + block * a->key_block + slot * a->key_slot + head * a->key_cache_head;
        const number *value = a->value_cache + block * a->value_block + slot * a->value_slot +
                              head * a->value_cache_head;
        for (int d = 0; d < a->k_dim; d += LANES) *(vec *)(w->keys + k * a->k_dim + d) = load(key + d);
        for (int d = 0; d < a->v_dim; d += LANES)
            *(vec *)(w->values + k * a->v_dim + d) = load(value + d);
    }
}

static inline __attribute__((always_inline)) void add_values(
    const arguments *a, workspace *w, int row, vec masses, int low, int high
) {
    for (int d = 0; d < a->v_dim; d += LANES) {
        vec output = *(vec *)(w->output[row] + d);
        for (int k = low; k <= high; k++)
            output += masses[k] * *(const vec *)(w->values + k * a->v_dim + d);
        *(vec *)(w->output[row] + d) = output;
    }
}

/* Adds a group of keys to one row's softmax. */
static inline void add_group(
    const arguments *a, workspace *w, int row, int32_t start, int32_t first, int32_t last
) {
    static const int_vec count = PLACES;
    vec scores = products(w->query[row], w->keys, a->k_dim) * a->scale;
    if (a->softcap != 0.0f) {
        vec ratio = scores / a->softcap;
        int_vec is_negative = ratio < 0.0f;
        vec power = exponential(choose(is_negative, ratio, -ratio) * 2.0f); /* e^-2|x| */
        vec tanh = (1.0f - power) / (1.0f + power);
        scores = choose(is_negative, -tanh, tanh) * a->softcap;
    }
    if (start < first || start + KEYS - 1 > last) {
        int_vec place = count + start;
        scores = choose((place >= first) & (place <= last), scores, splat(-INFINITY));
    }
    float most = largest(scores);
    if (!(most <= w->most[row])) { /* larger, or no number, which then shows in the output */
        float shrink = w->most[row] == -INFINITY ? 0.0f : expf(w->most[row] - most);
        w->most[row] = most;
        w->total[row] *= shrink;
        for (int d = 0; d < a->v_dim; d += LANES) *(vec *)(w->output[row] + d) *= shrink;
    }
    if (w->most[row] == -INFINITY) return; /* nothing seen so far */
    vec masses = exponential(scores - w->most[row]);
    w->total[row] += sum(masses);
    /* What is hidden is left out: it may be no number. */
    int low = first > start ? first - start : 0;
    int high = last - start < KEYS - 1 ? last - start : KEYS - 1;
    if (low == 0 && high == KEYS - 1)
        add_values(a, w, row, masses, 0, KEYS - 1);
    else
        add_values(a, w, row, masses, low, high);
}

static void attend_tile(const arguments *a, workspace *w, int32_t sequence, int32_t query, int head) {
    int group = a->num_heads / a->num_kv_heads;
    int32_t start = a->query_starts[sequence];
    int32_t num_queries = a->query_starts[sequence + 1] - start - query;
    if (num_queries > a->tile_queries) num_queries = a->tile_queries;
    int32_t position = a->seq_lens[sequence] + query; /* of the tile's first query */
    for (int32_t q = 0; q < num_queries; q++)
        for (int g = 0; g < group; g++) {
            int row = q * group + g, own = head * group + g;
            const number *from =
                a->query + (start + query + q) * a->query_token + own * a->query_head;
            for (int d = 0; d < a->k_dim; d += LANES) *(vec *)(w->query[row] + d) = load(from + d);
            memset(w->output[row], 0, a->v_dim * sizeof(float));
            w->most[row] = a->sinks ? a->sinks[own] : -INFINITY;
            w->total[row] = a->sinks ? 1.0f : 0.0f;
        }
    int32_t end = position + num_queries;
    /* Groups begin at multiples of their size, so that a query's bits don't depend on the tile. */
    int32_t begin = first_seen(a, position) / KEYS * KEYS;
    int32_t held = a->first_blocks[sequence] * a->block_size;
    for (int32_t key = begin < held ? held : begin; key < end; key += KEYS) {
        read_group(a, w, sequence, head, key, end - key < KEYS ? end - key : KEYS);
        for (int32_t q = 0; q < num_queries; q++) {
            if (key > position + q) continue;
            int32_t first = first_seen(a, position + q);
            if (key + KEYS <= first) continue;
            for (int g = 0; g < group; g++)
                add_group(a, w, q * group + g, key, first, position + q);
        }
    }
    for (int32_t q = 0; q < num_queries; q++)
        for (int g = 0; g < group; g++) {
            int row = q * group + g;
            number *to = a->output + ((start + query + q) * (int64_t)a->num_heads + head * group + g) *
                                         a->v_dim;
            for (int d = 0; d < a->v_dim; d += LANES)
                store(to + d, *(vec *)(w->output[row] + d) / w->total[row]);
        }
}

/* Writes the step's K and V to their slots, then attends. */
void attend(const arguments *a) {
#pragma omp parallel num_threads(a->num_threads)
    {
#pragma omp for schedule(static)
        for (int32_t t = 0; t < a->num_tokens; t++) {
            number *key = a->key_cache + a->slot_blocks[t] * a->key_block + a->slot_offsets[t] * a->key_slot;
            number *value =
                a->value_cache + a->slot_blocks[t] * a->value_block + a->slot_offsets[t] * a->value_slot;
            for (int h = 0; h < a->num_kv_heads; h++) {
                memcpy(
                    key + h * a->key_cache_head,
                    a->key + t * a->key_token + h * a->key_head,
                    a->k_dim * sizeof(number)
                );
                memcpy(
                    value + h * a->value_cache_head,
                    a->value + t * a->value_token + h * a->value_head,
                    a->v_dim * sizeof(number)
                );
            }
        }
        workspace *w = (workspace *)a->workspaces + omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (int32_t i = 0; i < a->num_items * a->num_kv_heads; i++) {
            const int32_t *item = a->items + i / a->num_kv_heads * 2;
            attend_tile(a, w, item[0], item[1], i % a->num_kv_heads);
        }
    }
}

/* What the caller must know. */
int64_t workspace_bytes(void) { return sizeof(workspace); }

int64_t arguments_bytes(void) { return sizeof(arguments); }

/* Where the compiler must take vectors apart, products by torch are faster. */
int has_vectors(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}
