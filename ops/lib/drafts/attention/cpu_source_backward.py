"""C source of the CPU attention, second part: the backward pass.

Weights are made anew from the log-sum-exp. With delta = sum of output * gradient of a row, the gradient of a score
is weight * (gradient . value - delta). A tile of rows is held while a chunk of keys after the other passes; the
gradients of keys and values are summed in memory of their own, [T, D] for each.
Source: FlashAttention, arXiv 2205.14135, section 3.1 and appendix B.

Legend: T packed context tokens, K block size, D head size.
"""

BACKWARD = r"""
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
"""
