/* One sweep over a tile of logits: finds each row's maximum, replaces the logits by their exponentials and sums these,
 * while the row is in the first-level cache; torch needs four passes for it.
 *
 * The reference of a row is what its exponentials are taken against. It is raised only when the maximum passes it by
 * more than SLACK, so that sums made before seldom need a new scale. NaN and infinite logits come out as NaN.
 * Compiled behind lanes.c.
 */

/* Notes the logit of the label at x[at] and whether it is the first best so far; takes it out if it has to hide. */
static void look(float *x, int64_t columns, int64_t at, int hide, float best, float *logit, uint8_t *ahead)
{
    float own = x[at];
    int64_t beaten = !(own > best);
    for (int64_t c = 0; c < at; c++)
        beaten += x[c] >= own;
    for (int64_t c = at + 1; c < columns; c++)
        beaten += x[c] > own;
    *logit = own;
    *ahead = beaten == 0;
    if (hide)
        x[at] = -INFINITY;
}

int sweep(float *logits, int64_t rows, int64_t columns, int64_t start, float slack, float *reference, float *best,
          double *total, float *scale, const int64_t *labels, int hide, float *logit, uint8_t *ahead)
{
    const vec zero = {0};
    int raised = 0;
    int64_t whole = columns - columns % LANES, rest = columns - whole;
    for (int64_t row = 0; row < rows; row++) {
        float *x = logits + row * columns;
        if (labels && labels[row] >= start && labels[row] < start + columns)
            look(x, columns, labels[row] - start, hide, best[row], logit + row, ahead + row);
        vec last = zero - INFINITY, most = last, sums = zero;
        memcpy(&last, x + whole, rest * sizeof(float));
        most = pick(last > most, last, most);
        for (int64_t c = 0; c < whole; c += LANES) {
            vec now = load(x + c);
            most = pick(now > most, now, most);
        }
        float top = most[0];
        for (int lane = 1; lane < LANES; lane++)
            top = most[lane] > top ? most[lane] : top;
        best[row] = top > best[row] ? top : best[row];
        scale[row] = 1;
        if (top > reference[row] + slack) {
            scale[row] = expf(reference[row] - top);
            reference[row] = top;
            raised = 1;
        }
        float base = reference[row];
        for (int64_t c = 0; c < whole; c += LANES) {
            vec now = exponential(load(x + c) - base);
            sums += now;
            memcpy(x + c, &now, sizeof now);
        }
        last = exponential(last - base);
        memcpy(x + whole, &last, rest * sizeof(float));
        double sum = 0;
        for (int lane = 0; lane < LANES; lane++)
            sum += (double)sums[lane] + (lane < rest ? (double)last[lane] : 0.0);
        total[row] = total[row] * scale[row] + sum;
    }
    return raised;
}

/* Takes a tile into each row's best values and their tokens, [rows, count], the best first, of equal ones the first.
 * Few logits pass the worst of them, so a row is mostly compared, sixteen at a time. NaN is never among the best.
 */
void keep_best(const float *logits, int64_t rows, int64_t columns, int64_t start, int64_t count, float *values,
               int64_t *tokens)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * columns;
        float *value = values + row * count;
        int64_t *token = tokens + row * count;
        for (int64_t c = 0; c < columns; c += LANES) {
            int64_t end = c + LANES < columns ? c + LANES : columns;
            if (end - c == LANES) {
                ivec above = load(x + c) > (vec){0} + value[count - 1];
                int any = 0;
                for (int lane = 0; lane < LANES; lane++)
                    any |= above[lane];
                if (!any)
                    continue;
            }
            for (int64_t at = c; at < end; at++) {
                int64_t place = count - 1;
                if (!(x[at] > value[place]))
                    continue;
                for (; place > 0 && x[at] > value[place - 1]; place--) {
                    value[place] = value[place - 1];
                    token[place] = token[place - 1];
                }
                value[place] = x[at];
                token[place] = start + at;
            }
        }
    }
}
