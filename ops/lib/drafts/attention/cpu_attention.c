/* Attention of blocks over a context on the CPU. D is defined by the compiler's command.
 *
 * Rows (query heads of a key/value head, slots) come in groups of ROWS of one block; a tile of GROUPS groups goes over
 * the context in chunks of CHUNK keys. Every product is made of one of ROWS rows of `a` with 2 * LANES columns of `b`
 * whose sums stay in registers. Keys are packed in panels [WIDE keys as columns][D], so that scores are such a product.
 * Scores have the factor log2(e), which the queries are multiplied with; weights are powers of 2. The running softmax
 * keeps a reference for each row, raised only when a score passes it by more than SLACK; a block's own slots come first,
 * so that it is finite. Only chunks at the border of what a row sees are masked.
 * Source: FlashAttention, arXiv 2205.14135; online softmax, arXiv 1805.02867.
 *
 * Legend: T packed context tokens, K block size, G key/value heads, R query heads of each, D head size.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define HELD 8 /* rows of accumulators held in registers: of 32 vectors, 16 and what is read */
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define HELD 4
#else
#error "not measured on this processor: torch is the safe choice"
#endif
#define WIDE (2 * LANES)
#define ROWS 8
#define GROUPS 8
#define TILE (ROWS * GROUPS)
#define CHUNK 64
#define HIDDEN -1e30f /* a score that no weight is made of */
#define SLACK 10.0f   /* how far scores may pass the reference before sums get a new scale */
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

/* Steps are counted in floats; q, own_k, own_v, out, grad and their gradients are contiguous, grad_k and grad_v
   [T, G, D], lse [G, blocks, K * R]; grad_own_k and grad_own_v come as zeros. order: blocks by (start, end).
   window 0: none. */
typedef struct {
    const float *q, *own_k, *own_v, *k, *v;
    const int64_t *start, *end, *order;
    float *out, *lse;
    const float *grad;
    float *grad_q, *grad_own_k, *grad_own_v, *grad_k, *grad_v;
    int64_t blocks, K, G, R, T, window, k_head, k_token, v_head, v_token;
} Problem;

/* Up to ROWS rows of one block; padding repeats the last. Row r sees context [low[r], high) and own slots
   [own_low[r], own_high[r]). All rows together see context inside [least, high), each row all of [core, high). */
typedef struct {
    int64_t block, first, count, least, core, high;
    int32_t low[ROWS], own_low[ROWS], own_high[ROWS];
} Group;

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE vec load(const float *from) { vec x; memcpy(&x, from, sizeof x); return x; }

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec larger(vec a, vec b)
{
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE float largest(vec x)
{
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int lane = 1; lane < LANES; lane++)
        top = x[lane] > top ? x[lane] : top;
    return top;
#endif
}

INLINE float total(vec x)
{
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += x[lane];
    return sum;
}

/* 2^x for -126 <= x < 127, and 2^-126 for less. What the Taylor polynomial leaves out is below 2e-7 relative. */
INLINE vec power(vec x)
{
    const vec zero = {0};
    x = larger(zero - 126.0f, x);
    vec shifted = x + 12582912.0f;
    vec r = x - (shifted - 12582912.0f);
    vec p = r * 1.5403530e-4f + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

/* c[ROWS][wide * LANES] (+)= a[ROWS][depth] b[depth][wide * LANES], sums in registers. */
INLINE void product(const int wide, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                    int64_t depth, float *c, int64_t c_row, const int add)
{
    for (int from = 0; from < ROWS; from += HELD) {
        const vec zero = {0};
        vec sum[HELD][2];
        const float *a_at = a + from * a_row, *b_at = b;
        float *c_at = c + from * c_row;
#pragma GCC unroll 8
        for (int r = 0; r < HELD; r++)
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                sum[r][j] = add ? load(c_at + r * c_row + j * LANES) : zero;
        for (int64_t d = 0; d < depth; d++, a_at += a_step, b_at += b_step) {
            vec x[2];
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                x[j] = load(b_at + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < HELD; r++)
#pragma GCC unroll 2
                for (int j = 0; j < wide; j++)
                    sum[r][j] += a_at[r * a_row] * x[j];
        }
#pragma GCC unroll 8
        for (int r = 0; r < HELD; r++)
#pragma GCC unroll 2
            for (int j = 0; j < wide; j++)
                store(c_at + r * c_row + j * LANES, sum[r][j]);
    }
}

/* s[ROWS][n] = a[ROWS][D] times the panels of n keys. */
INLINE void scores(const float *a, const float *panels, int64_t n, float *s)
{
    for (int64_t c = 0; c < n; c += WIDE)
        product(2, a, D, 1, panels + c * D, WIDE, D, s + c, CHUNK, 0);
}

/* c[ROWS][D] += a[ROWS][depth] b[depth][D] */
INLINE void add_product(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t depth, float *c)
{
    for (int64_t j = 0; j + WIDE <= D; j += WIDE)
        product(2, a, a_row, a_step, b + j, D, depth, c + j, D, 1);
    if (D % WIDE)
        product(1, a, a_row, a_step, b + D - LANES, D, depth, c + D - LANES, D, 1);
}

/* Values at keys outside [low, high) become `value`. */
static void hide(float *x, int64_t n, int32_t low, int32_t high, float value)
{
    for (int64_t c = 0; c < n; c++)
        x[c] = c >= low && c < high ? x[c] : value;
}

/* keys [0, padded) of a head into panels [padded / WIDE][D][WIDE]; zeros from n on */
static void pack_panels(const float *x, int64_t step, int64_t n, int64_t padded, float *panels)
{
    for (int64_t t = 0; t < padded; t += WIDE, panels += WIDE * D)
        for (int64_t i = 0; i < WIDE; i++)
            for (int64_t d = 0; d < D; d++)
                panels[d * WIDE + i] = t + i < n ? x[(t + i) * step + d] : 0;
}

/* keys [0, padded) of a head into [padded][D]; zeros from n on */
static void pack_rows(const float *x, int64_t step, int64_t n, int64_t padded, float *rows)
{
    for (int64_t t = 0; t < n; t++)
        memcpy(rows + t * D, x + t * step, D * sizeof(float));
    memset(rows + n * D, 0, (padded - n) * D * sizeof(float));
}

INLINE int64_t whole(int64_t n) { return (n + WIDE - 1) / WIDE * WIDE; }

static int64_t groups_of_block(const Problem *p) { return (p->K * p->R + ROWS - 1) / ROWS; }

static Group group_at(const Problem *p, int64_t index)
{
    Group g;
    int64_t each = groups_of_block(p), rows = p->K * p->R;
    g.block = p->order[index / each];
    g.first = index % each * ROWS;
    g.count = rows - g.first < ROWS ? rows - g.first : ROWS;
    int64_t start = p->start[g.block], end = p->end[g.block];
    g.high = g.least = end;
    g.core = start;
    for (int64_t r = 0; r < ROWS; r++) {
        int64_t slot = (g.first + (r < g.count ? r : g.count - 1)) / p->R, low = start;
        g.own_low[r] = 0;
        g.own_high[r] = p->K;
        if (p->window) {
            low = end + slot - p->window + 1;
            low = low < start ? start : low > end ? end : low;
            g.own_low[r] = slot - p->window + 1 > 0 ? slot - p->window + 1 : 0;
            g.own_high[r] = slot + 1;
        }
        g.low[r] = low;
        g.least = low < g.least ? low : g.least;
        g.core = low > g.core ? low : g.core;
    }
    return g;
}

/* Row r of a group in [N, K, H, D]. */
INLINE int64_t row_at(const Problem *p, int64_t g, const Group *group, int64_t r)
{
    int64_t row = group->first + r;
    return (((group->block * p->K + row / p->R) * p->G + g) * p->R + row % p->R) * D;
}

/* A group's rows of x, scaled; zeros for padding. */
static void gather(const Problem *p, int64_t g, const Group *group, const float *x, float scale, float *rows)
{
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t d = 0; d < D; d++)
            rows[r * D + d] = r < group->count ? x[row_at(p, g, group, r) + d] * scale : 0;
}

/* One chunk of keys into the running softmax of a group. low, high: what a row sees of the chunk; NULL for all. */
static void attend(const float *q, const float *panels, const float *v, int64_t n, const int32_t *low,
                   const int32_t *high, float *o, float *reference, vec *sums)
{
    const vec zero = {0};
    float s[ROWS * CHUNK] __attribute__((aligned(64)));
    scores(q, panels, n, s);
    for (int r = 0; r < ROWS; r++) {
        float *x = s + r * CHUNK;
        if (low)
            hide(x, n, low[r], high[r], HIDDEN);
        vec most = load(x);
        for (int64_t c = LANES; c < n; c += LANES)
            most = larger(load(x + c), most);
        float top = largest(most);
        if (top > reference[r] + SLACK) {
            float scale = exp2f(reference[r] - top);
            reference[r] = top;
            sums[r] *= scale;
            for (int64_t d = 0; d < D; d++)
                o[r * D + d] *= scale;
        }
        float base = reference[r];
        vec sum = zero;
        for (int64_t c = 0; c < n; c += LANES) {
            vec now = load(x + c), e = power(now - base);
            if (low)
                e = pick(now == zero + HIDDEN, zero, e);
            sum += e;
            store(x + c, e);
        }
        sums[r] += sum;
    }
    add_product(s, CHUNK, 1, v, n, o);
}

/* What a group sees of the chunk [at, at + n): 0 nothing, 1 some, 2 every row everything. */
static int view(const Group *g, int64_t at, int64_t n, int32_t *low, int32_t *high)
{
    if (g->least >= at + n || g->high <= at || g->least >= g->high)
        return 0;
    if (g->core <= at && g->high >= at + n)
        return 2;
    for (int r = 0; r < ROWS; r++) {
        low[r] = g->low[r] - at;
        high[r] = g->high - at;
    }
    return 1;
}

/* What the rows of a group see of their own slots, from slot `at` on. */
static void own_view(const Group *g, int64_t at, int32_t *low, int32_t *high)
{
    for (int r = 0; r < ROWS; r++) {
        low[r] = g->own_low[r] - at;
        high[r] = g->own_high[r] - at;
    }
}

/* The groups of a tile, and the context that any of them sees, from a multiple of WIDE. */
static int64_t tile_at(const Problem *p, int64_t first, Group *groups, int64_t *low, int64_t *high)
{
    int64_t count = p->blocks * groups_of_block(p) - first;
    count = count < GROUPS ? count : GROUPS;
    *low = p->T;
    *high = 0;
    for (int64_t i = 0; i < count; i++) {
        groups[i] = group_at(p, first + i);
        if (groups[i].least < groups[i].high) {
            *low = groups[i].least < *low ? groups[i].least : *low;
            *high = groups[i].high > *high ? groups[i].high : *high;
        }
    }
    *low = *low / WIDE * WIDE;
    return count;
}

INLINE int64_t chunk_size(int64_t left) { return left < CHUNK ? whole(left) : CHUNK; }

/* Output and log-sum-exp (base 2) of key/value heads [first_head, last_head). 1: no memory. */
int forward(const Problem *p, int64_t first_head, int64_t last_head)
{
    const float scale = LOG2_E / sqrtf(D);
    int64_t T = whole(p->T), K = whole(p->K), all = p->blocks * groups_of_block(p);
    float *memory;
    if (posix_memalign((void **)&memory, 64, (2 * (T + K) + 2 * TILE) * D * sizeof(float)))
        return 1;
    float *panels = memory, *v = panels + T * D, *own_panels = v + T * D, *own_v = own_panels + K * D;
    float *q = own_v + K * D, *o = q + TILE * D;
    for (int64_t g = first_head; g < last_head; g++) {
        pack_panels(p->k + g * p->k_head, p->k_token, p->T, T, panels);
        pack_rows(p->v + g * p->v_head, p->v_token, p->T, T, v);
        for (int64_t first = 0; first < all; first += GROUPS) {
            Group groups[GROUPS];
            float reference[TILE];
            vec sums[TILE];
            int64_t low, high, count = tile_at(p, first, groups, &low, &high);
            int32_t from[ROWS], to[ROWS];
            memset(o, 0, TILE * D * sizeof(float));
            memset(sums, 0, sizeof sums);
            for (int64_t i = 0; i < count; i++) {
                Group *group = groups + i;
                gather(p, g, group, p->q, scale, q + i * ROWS * D);
                if (i == 0 || group->block != groups[i - 1].block) {
                    int64_t at = (group->block * p->K * p->G + g) * D;
                    pack_panels(p->own_k + at, p->G * D, p->K, K, own_panels);
                    pack_rows(p->own_v + at, p->G * D, p->K, K, own_v);
                }
                for (int r = 0; r < ROWS; r++)
                    reference[i * ROWS + r] = -INFINITY;
                for (int64_t c = 0; c < p->K; c += CHUNK) {
                    own_view(group, c, from, to);
                    attend(q + i * ROWS * D, own_panels + c * D, own_v + c * D, chunk_size(p->K - c), from, to,
                           o + i * ROWS * D, reference + i * ROWS, sums + i * ROWS);
                }
            }
            for (int64_t c = low; c < high; c += CHUNK)
                for (int64_t i = 0; i < count; i++) {
                    int64_t n = chunk_size(high - c);
                    int seen = view(groups + i, c, n, from, to);
                    if (seen)
                        attend(q + i * ROWS * D, panels + c * D, v + c * D, n, seen == 2 ? NULL : from, to,
                               o + i * ROWS * D, reference + i * ROWS, sums + i * ROWS);
                }
            for (int64_t i = 0; i < count; i++)
                for (int64_t r = 0; r < groups[i].count; r++) {
                    float sum = total(sums[i * ROWS + r]);
                    float *to_row = p->out + row_at(p, g, groups + i, r);
                    for (int64_t d = 0; d < D; d++)
                        to_row[d] = o[(i * ROWS + r) * D + d] / sum;
                    p->lse[(g * p->blocks + groups[i].block) * p->K * p->R + groups[i].first + r] =
                        reference[i * ROWS + r] + log2f(sum);
                }
        }
    }
    free(memory);
    return 0;
}

/* The backward pass.
 *
 * Weights are made anew from the log-sum-exp. With delta = sum of output * gradient of a row, the gradient of a score
 * is weight * (gradient . value - delta). A tile of rows is held while a chunk of keys after the other passes; the
 * gradients of keys and values are summed in memory of their own, [T, D] for each.
 * Source: FlashAttention, arXiv 2205.14135, section 3.1 and appendix B.
 */
/* Rows of a tile in the backward pass. */
typedef struct {
    float q[TILE * D], grad[TILE * D], grad_q[TILE * D];
    float weight[TILE * CHUNK], slope[TILE * CHUNK]; /* of the chunk at hand */
    float delta[TILE], lse[TILE];
} __attribute__((aligned(64))) Rows;

/* Weights of a group over one chunk of keys, and slopes: the gradients of their scores. */
static void slopes(Rows *rows, int64_t i, const float *k_panels, const float *v_panels, int64_t n,
                   const int32_t *low, const int32_t *high)
{
    float *weight = rows->weight + i * ROWS * CHUNK, *slope = rows->slope + i * ROWS * CHUNK;
    scores(rows->q + i * ROWS * D, k_panels, n, weight);
    scores(rows->grad + i * ROWS * D, v_panels, n, slope);
    for (int r = 0; r < ROWS; r++) {
        float lse = rows->lse[i * ROWS + r], delta = rows->delta[i * ROWS + r];
        float *w = weight + r * CHUNK, *s = slope + r * CHUNK;
        for (int64_t c = 0; c < n; c += LANES)
            store(w + c, power(load(w + c) - lse));
        if (low)
            hide(w, n, low[r], high[r], 0);
        for (int64_t c = 0; c < n; c += LANES)
            store(s + c, load(w + c) * (load(s + c) - delta));
    }
}

/* What groups [first, last) add to the gradients of n keys and values, and these to the gradients of the queries. */
static void spread(Rows *rows, int64_t first, int64_t last, const float *k, int64_t n, float *grad_k, float *grad_v)
{
    int64_t from = first * ROWS, depth = (last - first) * ROWS;
    for (int64_t c = 0; c < n; c += ROWS) {
        add_product(rows->weight + from * CHUNK + c, 1, CHUNK, rows->grad + from * D, depth, grad_v + c * D);
        add_product(rows->slope + from * CHUNK + c, 1, CHUNK, rows->q + from * D, depth, grad_k + c * D);
    }
    for (int64_t i = first; i < last; i++)
        add_product(rows->slope + i * ROWS * CHUNK, CHUNK, 1, k, n, rows->grad_q + i * ROWS * D);
}

/* The groups [first, last) of one block over its own slots. */
static void own_backward(const Problem *p, int64_t g, Rows *rows, const Group *groups, int64_t first, int64_t last,
                         float *memory)
{
    int64_t K = whole(p->K), at = (groups[first].block * p->K * p->G + g) * D, step = p->G * D;
    float *k = memory, *k_panels = k + K * D, *v_panels = k_panels + K * D, *grad_k = v_panels + K * D;
    float *grad_v = grad_k + K * D;
    int32_t from[ROWS], to[ROWS];
    pack_rows(p->own_k + at, step, p->K, K, k);
    pack_panels(p->own_k + at, step, p->K, K, k_panels);
    pack_panels(p->own_v + at, step, p->K, K, v_panels);
    memset(grad_k, 0, 2 * K * D * sizeof(float));
    for (int64_t c = 0; c < p->K; c += CHUNK) {
        int64_t n = chunk_size(p->K - c);
        for (int64_t i = first; i < last; i++) {
            own_view(groups + i, c, from, to);
            slopes(rows, i, k_panels + c * D, v_panels + c * D, n, from, to);
        }
        spread(rows, first, last, k + c * D, n, grad_k + c * D, grad_v + c * D);
    }
    for (int64_t t = 0; t < p->K; t++)
        for (int64_t d = 0; d < D; d++) {
            p->grad_own_k[at + t * step + d] += grad_k[t * D + d] * LN_2;
            p->grad_own_v[at + t * step + d] += grad_v[t * D + d];
        }
}

/* Queries, gradients and what is known of the rows of a tile. */
static void gather_rows(const Problem *p, int64_t g, Rows *rows, const Group *groups, int64_t count)
{
    const float scale = LOG2_E / sqrtf(D);
    memset(rows->grad_q, 0, sizeof rows->grad_q);
    for (int64_t i = 0; i < count; i++) {
        gather(p, g, groups + i, p->q, scale, rows->q + i * ROWS * D);
        gather(p, g, groups + i, p->grad, 1, rows->grad + i * ROWS * D);
        for (int64_t r = 0; r < ROWS; r++) {
            float delta = 0, lse = 0;
            if (r < groups[i].count) {
                const float *out = p->out + row_at(p, g, groups + i, r);
                for (int64_t d = 0; d < D; d++)
                    delta += out[d] * rows->grad[(i * ROWS + r) * D + d];
                lse = p->lse[(g * p->blocks + groups[i].block) * p->K * p->R + groups[i].first + r];
            }
            rows->delta[i * ROWS + r] = delta;
            rows->lse[i * ROWS + r] = lse;
        }
    }
}

/* All gradients of key/value heads [first_head, last_head). 1: no memory. */
int backward(const Problem *p, int64_t first_head, int64_t last_head)
{
    int64_t T = whole(p->T), K = whole(p->K), all = p->blocks * groups_of_block(p);
    float *memory;
    if (posix_memalign((void **)&memory, 64, 5 * (T + K) * D * sizeof(float) + sizeof(Rows)))
        return 1;
    float *k = memory, *k_panels = k + T * D, *v_panels = k_panels + T * D, *grad_k = v_panels + T * D;
    float *grad_v = grad_k + T * D, *own = grad_v + T * D;
    Rows *rows = (Rows *)(own + 5 * K * D);
    for (int64_t g = first_head; g < last_head; g++) {
        pack_rows(p->k + g * p->k_head, p->k_token, p->T, T, k);
        pack_panels(p->k + g * p->k_head, p->k_token, p->T, T, k_panels);
        pack_panels(p->v + g * p->v_head, p->v_token, p->T, T, v_panels);
        memset(grad_k, 0, 2 * T * D * sizeof(float));
        for (int64_t at = 0; at < all; at += GROUPS) {
            Group groups[GROUPS];
            int64_t low, high, count = tile_at(p, at, groups, &low, &high);
            int32_t from[ROWS], to[ROWS];
            gather_rows(p, g, rows, groups, count);
            for (int64_t first = 0, last; first < count; first = last) {
                for (last = first + 1; last < count && groups[last].block == groups[first].block;)
                    last++;
                own_backward(p, g, rows, groups, first, last, own);
            }
            for (int64_t c = low; c < high; c += CHUNK) {
                int64_t n = chunk_size(high - c), first = count, last = 0;
                for (int64_t i = 0; i < count; i++) {
                    int seen = view(groups + i, c, n, from, to);
                    if (seen) {
                        first = first < i ? first : i;
                        last = i + 1;
                        slopes(rows, i, k_panels + c * D, v_panels + c * D, n, seen == 2 ? NULL : from, to);
                    } else {
                        memset(rows->weight + i * ROWS * CHUNK, 0, ROWS * CHUNK * sizeof(float));
                        memset(rows->slope + i * ROWS * CHUNK, 0, ROWS * CHUNK * sizeof(float));
                    }
                }
                if (first < last)
                    spread(rows, first, last, k + c * D, n, grad_k + c * D, grad_v + c * D);
            }
            const float scale = 1 / sqrtf(D);
            for (int64_t i = 0; i < count; i++)
                for (int64_t r = 0; r < groups[i].count; r++)
                    for (int64_t d = 0; d < D; d++)
                        p->grad_q[row_at(p, g, groups + i, r) + d] = rows->grad_q[(i * ROWS + r) * D + d] * scale;
        }
        for (int64_t t = 0; t < p->T; t++)
            for (int64_t d = 0; d < D; d++) {
                p->grad_k[(t * p->G + g) * D + d] = grad_k[t * D + d] * LN_2;
                p->grad_v[(t * p->G + g) * D + d] = grad_v[t * D + d];
            }
    }
    free(memory);
    return 0;
}
