/* Rows of the draft's logits beside the target's, whole vocabularies: what ops/lib/drafts/losses/comparison.py computes
 * of them, with a row in the second-level cache. Sums of 1,024 columns are float32, those of more float64. NaN and
 * +inf among logits come out as NaN. Compiled behind lanes.c.
 */
#define COLUMNS 1024

/* 0 where less than a float32 can hold. */
static inline vec share(vec x) { return pick(x < (vec){0} - 87.0f, (vec){0}, exponential(x)); }

static inline double total(vec lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

/* Sixteen columns from c on, behind the last one `fill`. */
static inline vec columns_of(const float *x, int64_t c, int64_t columns, float fill)
{
    if (c + LANES <= columns)
        return load(x + c);
    vec last = (vec){0} + fill;
    memcpy(&last, x + c, (columns - c) * sizeof(float));
    return last;
}

static inline void store(float *x, int64_t c, int64_t columns, vec values)
{
    memcpy(x + c, &values, (c + LANES <= columns ? LANES : columns - c) * sizeof(float));
}

static float maximum(const float *x, int64_t columns)
{
    vec most = (vec){0} - INFINITY;
    for (int64_t c = 0; c < columns; c += LANES) {
        vec now = columns_of(x, c, columns, -INFINITY);
        most = pick(now > most, now, most);
    }
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++)
        top = most[lane] > top ? most[lane] : top;
    return top;
}

static inline int64_t until(int64_t start, int64_t columns)
{
    return start + COLUMNS < columns ? start + COLUMNS : columns;
}

/* Replaces logits by exp(logit - reference), reference the row's maximum. others: the sum of all but the label's. */
void normalise(float *logits, int64_t rows, int64_t columns, const int64_t *labels, float *reference, double *others,
               float *logit, uint8_t *correct)
{
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * columns;
        int64_t label = labels[row];
        float own = x[label], top = maximum(x, columns);
        int64_t earlier = 0;
        if (own == top)
            for (int64_t c = 0; c < label; c++)
                earlier += x[c] == top;
        reference[row] = top;
        logit[row] = own;
        correct[row] = own == top && !earlier;
        x[label] = -INFINITY;
        double sum = 0;
        for (int64_t start = 0; start < columns; start += COLUMNS) {
            vec sums = {0};
            for (int64_t c = start; c < until(start, columns); c += LANES) {
                vec now = share(columns_of(x, c, columns, -INFINITY) - top);
                sums += now;
                store(x, c, columns, now);
            }
            sum += total(sums);
        }
        others[row] = sum;
        x[label] = expf(own - top);
    }
}

/* sum p (y - x) of each row, p the softmax of the target's logits y, those of row of[row]. */
void mean_gap(const float *logits, const float *target, const int64_t *of, int64_t rows, int64_t columns, double *gap)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * columns, *y = target + of[row] * columns;
        float top = maximum(y, columns);
        double sum = 0, all = 0;
        for (int64_t start = 0; start < columns; start += COLUMNS) {
            vec gaps = {0}, sums = {0};
            for (int64_t c = start; c < until(start, columns); c += LANES) {
                vec theirs = columns_of(y, c, columns, -INFINITY), p = share(theirs - top);
                vec apart = columns_of(y, c, columns, 0) - columns_of(x, c, columns, 0);
                gaps += p * apart;
                sums += p;
            }
            sum += total(gaps);
            all += total(sums);
        }
        gap[row] = sum / all;
    }
}

/* sums [4, rows]: of |q - p|, of min(q, p), and of q where it is above p, and below; half of q counts to both if q = p. */
void distances(const float *draft, const float *target, const int64_t *of, int64_t rows, int64_t columns,
               const float *factor, const float *target_factor, double *sums)
{
    const vec zero = {0};
    for (int64_t row = 0; row < rows; row++) {
        const float *x = draft + row * columns, *y = target + of[row] * columns;
        float own = factor[row], theirs = target_factor[of[row]];
        double apart = 0, least = 0, above = 0, below = 0;
        for (int64_t start = 0; start < columns; start += COLUMNS) {
            vec aparts = zero, leasts = zero, aboves = zero, belows = zero;
            for (int64_t c = start; c < until(start, columns); c += LANES) {
                vec q = columns_of(x, c, columns, 0) * own, p = columns_of(y, c, columns, 0) * theirs, gap = q - p;
                vec upper = pick(gap > zero, q, pick(gap < zero, zero, 0.5f * q));
                aparts += pick(gap < zero, -gap, gap);
                leasts += pick(gap > zero, p, q) + zero * gap;  /* NaN if either is */
                aboves += upper;
                belows += q - upper;
            }
            apart += total(aparts);
            least += total(leasts);
            above += total(aboves);
            below += total(belows);
        }
        double found[4] = {apart, least, above, below};
        for (int each = 0; each < 4; each++)
            sums[each * rows + row] = found[each];
    }
}

/* Replaces the draft's exponentials by the slope of of_ce * ce + of_kl * kl + of_l1 * l1 in its logits. target NULL:
 * of_ce * ce alone. wrong: 1 - q of the label.
 */
void slope(float *draft, const float *target, const int64_t *of, int64_t rows, int64_t columns, const int64_t *labels,
           const float *factor, const float *target_factor, const float *wrong, const float *above, const float *below,
           const float *of_ce, const float *of_kl, const float *of_l1)
{
    const vec zero = {0};
    for (int64_t row = 0; row < rows; row++) {
        float *x = draft + row * columns, *at = x + labels[row], own = factor[row], ce = of_ce[row];
        float of_label = -ce * wrong[row];  /* ce * (q - 1) with all its digits */
        if (target) {
            const float *y = target + of[row] * columns;
            float theirs = target_factor[of[row]], kl = of_kl[row];
            float up = 2 * of_l1[row] * below[row], down = -2 * of_l1[row] * above[row], even = 0.5f * (up + down);
            float gap_of_label = *at * own - y[labels[row]] * theirs;
            of_label += *at * own * (gap_of_label > 0 ? up : gap_of_label < 0 ? down : even) + kl * gap_of_label;
            for (int64_t c = 0; c < columns; c += LANES) {
                vec q = columns_of(x, c, columns, 0) * own, p = columns_of(y, c, columns, 0) * theirs, gap = q - p;
                vec step = pick(gap > zero, zero + up, pick(gap < zero, zero + down, zero + even));
                store(x, c, columns, q * (step + ce) + kl * gap);
            }
        } else {
            for (int64_t c = 0; c < columns; c += LANES)
                store(x, c, columns, columns_of(x, c, columns, 0) * (own * ce));
        }
        *at = of_label;
    }
}
