/* Sixteen floats at a time, and their exponentials.
 *
 * exp(x) = 2^n exp(r), |r| <= ln(2) / 2: adding 1.5 * 2^23 rounds n to the low bits of a float, ln(2) is taken off in
 * two parts, and exp(r) is its Taylor polynomial of degree 7 (what is left out is below 1e-8 relative).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline vec load(const float *from) { vec x; memcpy(&x, from, sizeof x); return x; }

static inline vec exponential(vec x)
{
    const vec zero = {0};
    x = pick(x < zero - 87.0f, zero - 87.0f, x);
    vec shifted = x * 1.44269504f + 12582912.0f;
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + (r + 1.0f);
    ivec power = ((ivec)shifted << 23) + (127 << 23);
    return p * (vec)power;
}
