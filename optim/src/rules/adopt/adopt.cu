// ADOPT over a flat vector, with one to four moments. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m v and writes p m v, 28 bytes an element; each further moment takes 8 more.

// constants: the moments', b2 w2 eps bound lr, of given: the moments', beta2 eps
__device__ inline void adopt_constants(Row& row, double lr) {
    double beta2 = row.given[MIX], *c = row.constants + MIX;
    set_decay(row, lr);
    mix_constants(row, false);
    c[0] = beta2, c[1] = minus(1.0, beta2), c[2] = row.given[MIX + 1];
    c[3] = root(root(__ull2double_rn(row.t - 1)));
    c[4] = lr;
}

template <typename Number, int MOMENTS>
struct Adopt {
    typedef Number T;
    static constexpr int STATES = MOMENTS + 1;
    Frame<T> frame;
    Mix<T, MOMENTS> mix;
    T b2, w2, eps, bound, lr;
    bool first;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        mix.set_from(row);
        const double* c = row.constants + MIX;
        set(b2, c[0]), set(w2, c[1]), set(eps, c[2]), set(bound, c[3]), set(lr, c[4]);
        first = row.t == 1;
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[STATES]) const {
        T g1 = frame.gradient(p, g), &v = s[MOMENTS];
        if (first) {
            v = times(g1, g1);
            return;
        }
        // Comparisons that are false for NaN, so that NaN passes through.
        T den = root(v);
        den = den < eps ? eps : den;
        T h = over(g1, den);
        h = h > bound ? bound : h < -bound ? -bound : h;
        T u = mix.step(h, s);
        v = fused(times(w2, g1), g1, times(b2, v));
        p = frame.descend(p, times(lr, u));
    }
};

// With so many moments.
#define FORM(N)                                  \
    typedef Adopt<float, N> Adopt##N;            \
    typedef Adopt<double, N> Adopt##N##Long;     \
    PREPARE(adopt_##N, adopt_constants)          \
    KERNELS(adopt_##N, Adopt##N, Adopt##N##Long) \
    KERNELS_BF16_STATE(adopt_##N, Adopt##N)

FORM(1)
FORM(2)
FORM(3)
FORM(4)
