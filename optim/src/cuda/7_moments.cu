// Several slow moments of a gradient: moments.rs.

// Constants of `N` moments: w_j and q_j of each, then q0. Given: beta and weight of each, then q0.
constexpr int MOST_MOMENTS = 4, MIX = 2 * MOST_MOMENTS + 1;

// `correct`: whether moments start at 0 and are meant to be averages.
__device__ inline void mix_constants(Row& row, bool correct) {
    const double *beta = row.given, *weight = beta + MOST_MOMENTS;
    double *w = row.constants, *q = w + MOST_MOMENTS;
    for (int j = 0; j < MOST_MOMENTS; j++) {
        w[j] = minus(1.0, beta[j]);
        q[j] = over(weight[j], correct ? minus(1.0, power(beta[j], row.t)) : 1.0);
    }
    row.constants[MIX - 1] = row.given[MIX - 1];
}

template <typename T, int N>
struct Mix {
    T w[N], q[N], q0;

    __device__ void set_from(const Row& row) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            set(w[j], row.constants[j]);
            set(q[j], row.constants[MOST_MOMENTS + j]);
        }
        set(q0, row.constants[MIX - 1]);
    }

    // Moves the moments, the first of `s`, towards `x`, and mixes them.
    template <int S>
    __device__ T step(T x, T (&s)[S]) const {
        T u = times(q0, x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            s[j] = fused(w[j], minus(x, s[j]), s[j]);
            u = fused(q[j], s[j], u);
        }
        return u;
    }
};
