/* One attention call of a step over the paged KV cache, on a CPU.
 *
 * Compiled twice from this file, for float and for bfloat16 numbers (-DBFLOAT16). Everything is
 * computed in float. A work item is a tile of one sequence's queries, for one KV head: the query
 * heads that share it are rows of the same tile, so that keys and values are read once for them.
 * Softmax is online (Milakov and Gimelshein: Online normalizer calculation for softmax).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"
#include "vectors.h"

#define KEYS 16      /* of a group */
#define MAX_ROWS 48  /* of a tile: queries times heads; heads alone may be more */
#define MAX_HEADS 128
#define MAX_TILE (MAX_ROWS > MAX_HEADS ? MAX_ROWS : MAX_HEADS)
#define MAX_DIM 512
#define AT_ONCE 4    /* rows for which keys and values are read */
#define ITEMS 4      /* tiles for each thread, at least, that take all heads at once */
#define SUMS 8       /* vectors that registers hold, beside what is multiplied */
#define FEW 64       /* tokens; to write fewer isn't worth sharing */
#define LINE (64 / (int)sizeof(number))

/* Mirrored by workers/attention/native.py, as are the arguments. Of a step, for layers of a kind. */
typedef struct {
    const int32_t *seq_lens, *query_starts, *block_tables, *first_blocks;
    const int64_t *slot_blocks, *slot_offsets;
    const int32_t *items; /* [num_items, 2]: sequence, first query of the tile */
    int64_t table_stride;
    int32_t num_items, tile_queries;
} step;

/* Strides count numbers. */
typedef struct {
    const step *step;
    const number *query, *key, *value;
    number *key_cache, *value_cache, *output;
    const float *sinks;
    void *workspaces; /* one for each thread, from a multiple of 64 bytes on */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t key_block, key_slot, key_cache_head, value_block, value_slot, value_cache_head;
    int32_t num_heads, num_kv_heads, k_dim, v_dim, block_size, window, chunk, num_threads;
    float scale, softcap;
} arguments;

/* A thread's room for one tile. */
typedef struct {
    float query[MAX_TILE][MAX_DIM], output[MAX_TILE][MAX_DIM];
    float most[MAX_TILE], total[MAX_TILE];
    float scores[AT_ONCE][KEYS]; /* then what they weigh */
} __attribute__((aligned(64))) workspace;

/* Where the keys and values of a group lie: those of a tile's first head. */
typedef struct {
    const number *keys[KEYS], *values[KEYS];
} group_places;

/* Place of the first key that the query at `position` sees. */
static inline int32_t first_seen(const arguments *a, int32_t position) {
    if (a->chunk) return position / a->chunk * a->chunk;
    return a->window && position + 1 > a->window ? position + 1 - a->window : 0;
}

static void find_group(
    const arguments *a, group_places *places, int32_t sequence, int head, int32_t start, int count
) {
    const int32_t *table =
        a->step->block_tables + sequence * a->step->table_stride - a->step->first_blocks[sequence];
    int32_t place = start / a->block_size;
    int64_t block = table[place], slot = start - place * a->block_size;
    for (int k = 0; k < KEYS; k++) {
        if (k > 0 && k < count && ++slot == a->block_size) {
            block = table[++place];
            slot = 0;
        } /* past the end the last one is read again: its score is masked */
        places->keys[k] =
            a->key_cache + block * a->key_block + slot * a->key_slot + head * a->key_cache_head;
        places->values[k] = a->value_cache + block * a->value_block + slot * a->value_slot +
                            head * a->value_cache_head;
    }
}

/* One token's numbers may be far from those of the next: hardware doesn't see it coming. */
static void fetch_group(const arguments *a, const group_places *places, int head) {
    for (int k = 0; k < KEYS; k++) {
        const number *key = places->keys[k] + head * a->key_cache_head;
        const number *value = places->values[k] + head * a->value_cache_head;
        for (int d = 0; d < a->k_dim; d += LINE) __builtin_prefetch(key + d, 0, 3);
        for (int d = 0; d < a->v_dim; d += LINE) __builtin_prefetch(value + d, 0, 3);
    }
}

/* Products of some rows and all keys of a group, `num_keys` of them at a time. */
INLINE void multiply_keys(
    const arguments *a, workspace *w, const group_places *places, int head, int row, int num_rows,
    int num_keys
) {
    int64_t offset = head * a->key_cache_head;
    for (int k = 0; k < KEYS; k += num_keys) {
        vec part[SUMS];
        for (int i = 0; i < SUMS; i++) part[i] = splat(0.0f);
        for (int d = 0; d < a->k_dim; d += LANES)
            for (int i = 0; i < num_keys; i++) {
                vec key = load(places->keys[k + i] + offset + d);
                for (int r = 0; r < num_rows; r++)
                    part[r * num_keys + i] += *(const vec *)(w->query[row + r] + d) * key;
            }
        for (int i = 0; i < num_rows * num_keys; i += 4) {
            quad four = sums_of_four(part[i], part[i + 1], part[i + 2], part[i + 3]);
            for (int j = i; j < i + 4 && j < num_rows * num_keys; j++)
                w->scores[j / num_keys][k + j % num_keys] = four[j - i];
        }
    }
}

/* Adds the values of keys low to high, times what they weigh, to some rows' outputs. */
INLINE void add_values(
    const arguments *a, workspace *w, const group_places *places, int head, int row, int num_rows,
    int low, int high
) {
    int64_t offset = head * a->value_cache_head;
    int at_once = SUMS / num_rows; /* vectors */
    for (int d = 0; d < a->v_dim; d += at_once * LANES) {
        /* Of the last ones some may lie past the end: they are added up for nothing. */
        int count = (a->v_dim - d) / LANES < at_once ? (a->v_dim - d) / LANES : at_once;
        vec output[SUMS];
        for (int i = 0; i < SUMS; i++) output[i] = splat(0.0f);
        for (int k = low; k <= high; k++)
            for (int v = 0; v < at_once; v++) {
                if (v >= count) break;
                vec value = load(places->values[k] + offset + d + v * LANES);
                for (int r = 0; r < num_rows; r++)
                    output[r * at_once + v] += w->scores[r][k] * value;
            }
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < count; v++)
                *(vec *)(w->output[row + r] + d + v * LANES) += output[r * at_once + v];
    }
}

static inline vec soft_capped(vec scores, float cap) {
    vec ratio = scores / cap;
    int_vec is_negative = ratio < 0.0f;
    vec power = exponential(choose(is_negative, ratio, -ratio) * 2.0f); /* e^-2|x| */
    vec tanh = (1.0f - power) / (1.0f + power);
    return choose(is_negative, -tanh, tanh) * cap;
}

/* Turns one row's scores into what keys weigh; those outside first to last are hidden. */
static inline void weigh(
    const arguments *a, workspace *w, float *scores, int row, int32_t start, int32_t first,
    int32_t last
) {
    vec here[KEYS / LANES];
    for (int v = 0; v < KEYS / LANES; v++) {
        static const int_vec count = PLACES;
        here[v] = *(const vec *)(scores + v * LANES) * a->scale;
        if (a->softcap != 0.0f) here[v] = soft_capped(here[v], a->softcap);
        int_vec place = count + (start + v * LANES);
        here[v] = choose((place >= first) & (place <= last), here[v], splat(-INFINITY));
    }
    vec most_lanes = here[0];
    for (int v = 1; v < KEYS / LANES; v++) most_lanes = larger(most_lanes, here[v]);
    float most = largest(most_lanes);
    if (!(most <= w->most[row])) { /* larger, or no number, which then shows in the output */
        float shrink = w->most[row] == -INFINITY ? 0.0f : expf(w->most[row] - most);
        w->most[row] = most;
        w->total[row] *= shrink;
        for (int d = 0; d < a->v_dim; d += LANES) *(vec *)(w->output[row] + d) *= shrink;
    }
    vec total = {0};
    for (int v = 0; v < KEYS / LANES; v++) {
        /* Nothing seen so far weighs nothing. */
        here[v] = w->most[row] == -INFINITY ? splat(0.0f) : exponential(here[v] - w->most[row]);
        total += here[v];
        *(vec *)(scores + v * LANES) = here[v];
    }
    w->total[row] += sum(total);
}

/* A tile: some queries of one sequence, and the query heads that share some KV heads. */
typedef struct {
    int32_t sequence, start; /* place of its first query in the step */
    int32_t position;        /* and in the sequence */
    int num_queries, head, num_heads, group;
} tile;

/* Adds a group of keys to some rows of one head, the first of which is `row` of the head's. Where
 * not all of them see all of it they are of one query. */
INLINE void add_group(
    const arguments *a, workspace *w, const tile *t, const group_places *places, int head, int row,
    int num_rows, int num_keys, int32_t start
) {
    int32_t last = t->position + row / t->group, first = first_seen(a, last);
    int place = head * t->num_queries * t->group + row;
    multiply_keys(a, w, places, head, place, num_rows, num_keys);
    for (int r = 0; r < num_rows; r++) {
        int32_t own = t->position + (row + r) / t->group;
        weigh(a, w, w->scores[r], place + r, start, first_seen(a, own), own);
    }
    /* What is hidden is left out: it may be no number. */
    int low = first > start ? first - start : 0;
    int high = last - start < KEYS - 1 ? last - start : KEYS - 1;
    if (low == 0 && high == KEYS - 1)
        add_values(a, w, places, head, place, num_rows, 0, KEYS - 1);
    else
        add_values(a, w, places, head, place, num_rows, low, high);
}

/* Adds a group of keys to all rows of a head, a few at a time. */
static void add_rows(
    const arguments *a, workspace *w, const tile *t, const group_places *places, int head,
    int32_t start
) {
    int count = t->num_queries * t->group;
    for (int row = 0; row < count;) {
        int32_t query = row / t->group, last = t->position + query;
        int left = count - row < AT_ONCE ? count - row : AT_ONCE;
        /* The first of them has the nearest end, the last one the farthest beginning. */
        int32_t farthest = first_seen(a, t->position + (row + left - 1) / t->group);
        if (start + KEYS - 1 > last || start < farthest) {
            int own = (query + 1) * t->group - row;
            if (left > own) left = own;
        }
        if (start <= last && start + KEYS > first_seen(a, last)) {
            switch (left) {
                case 1: add_group(a, w, t, places, head, row, 1, 8, start); break;
                case 2: add_group(a, w, t, places, head, row, 2, 4, start); break;
                case 3: add_group(a, w, t, places, head, row, 3, 2, start); break;
                default: add_group(a, w, t, places, head, row, 4, 2, start);
            }
        }
        row += left;
    }
}

static void begin_row(const arguments *a, workspace *w, int row, int32_t token, int head) {
    const number *from = a->query + token * a->query_token + head * a->query_head;
    for (int d = 0; d < a->k_dim; d += LANES) *(vec *)(w->query[row] + d) = load(from + d);
    memset(w->output[row], 0, a->v_dim * sizeof(float));
    w->most[row] = a->sinks ? a->sinks[head] : -INFINITY;
    w->total[row] = a->sinks ? 1.0f : 0.0f;
}

static void end_row(const arguments *a, const workspace *w, int row, int32_t token, int head) {
    number *to = a->output + (token * (int64_t)a->num_heads + head) * a->v_dim;
    for (int d = 0; d < a->v_dim; d += LANES)
        store(to + d, *(const vec *)(w->output[row] + d) / w->total[row]);
}

/* Rows are those of the first KV head, query by query, then those of the next. */
#define FOR_ROWS(function)                                                                         \
    for (int row = 0; row < t->num_heads * t->num_queries * t->group; row++) {                     \
        int query = row / t->group % t->num_queries, head = row / t->group / t->num_queries;       \
        function(a, w, row, t->start + query, (t->head + head) * t->group + row % t->group);       \
    }

static void attend_tile(const arguments *a, workspace *w, const tile *t) {
    FOR_ROWS(begin_row)
    int32_t end = t->position + t->num_queries;
    /* Groups begin at multiples of their size, so that a query's bits don't depend on the tile. */
    int32_t begin = first_seen(a, t->position) / KEYS * KEYS;
    int32_t held = a->step->first_blocks[t->sequence] * a->block_size;
    if (begin < held) begin = held;
    group_places places[2]; /* of this group and the next */
    for (int32_t key = begin, i = 0; key < end; key += KEYS, i ^= 1) {
        if (key == begin) find_group(a, places, t->sequence, t->head, key, end - key);
        int has_next = key + KEYS < end;
        if (has_next)
            find_group(a, places + !i, t->sequence, t->head, key + KEYS, end - key - KEYS);
        for (int head = 0; head < t->num_heads; head++) {
            if (has_next) fetch_group(a, places + !i, head);
            add_rows(a, w, t, places + i, head, key);
        }
    }
    FOR_ROWS(end_row)
}

static tile make_tile(const arguments *a, const int32_t *item, int head) {
    tile t = {
        .sequence = item[0],
        .start = a->step->query_starts[item[0]] + item[1],
        .position = a->step->seq_lens[item[0]] + item[1],
        .head = head,
        .num_heads = 1,
        .group = a->num_heads / a->num_kv_heads,
    };
    t.num_queries = a->step->query_starts[item[0] + 1] - t.start;
    if (t.num_queries > a->step->tile_queries) t.num_queries = a->step->tile_queries;
    return t;
}

/* A token's K and V, to their slot. */
static void write_token(const void *given, int64_t t, int thread) {
    const arguments *a = given;
    int64_t block = a->step->slot_blocks[t], offset = a->step->slot_offsets[t];
    number *key = a->key_cache + block * a->key_block + offset * a->key_slot;
    number *value = a->value_cache + block * a->value_block + offset * a->value_slot;
    for (int h = 0; h < a->num_kv_heads; h++) {
        memcpy(
            key + h * a->key_cache_head, a->key + t * a->key_token + h * a->key_head,
            a->k_dim * sizeof(number)
        );
        memcpy(
            value + h * a->value_cache_head, a->value + t * a->value_token + h * a->value_head,
            a->v_dim * sizeof(number)
        );
    }
    (void)thread;
}

/* Where threads have enough to do, small tiles take all heads at once: a token's keys lie side by
 * side. */
static int takes_all_heads(const arguments *a, const tile *t) {
    return a->step->num_items >= ITEMS * a->num_threads && t->num_queries * a->num_heads <= MAX_TILE;
}

static void attend_item(const void *given, int64_t item, int thread) {
    const arguments *a = given;
    workspace *w = (workspace *)a->workspaces + thread;
    tile t = make_tile(a, a->step->items + item / a->num_kv_heads * 2, item % a->num_kv_heads);
    if (takes_all_heads(a, &t)) {
        if (t.head) return;
        t.num_heads = a->num_kv_heads;
    }
    attend_tile(a, w, &t);
}

/* Writes the step's K and V to their slots, then attends. */
void attend(const void *given, int64_t num_tokens) {
    const arguments *a = given;
    lockstep_run_items(write_token, a, num_tokens, num_tokens > FEW ? a->num_threads : 1);
    lockstep_run_items(attend_item, a, (int64_t)a->step->num_items * a->num_kv_heads, a->num_threads);
}

/* What the caller must know. */
int64_t workspace_bytes(void) { return sizeof(workspace); }

int64_t arguments_bytes(void) { return sizeof(arguments); }

int64_t step_bytes(void) { return sizeof(step); }
