// Elementwise kernels: sums, norms, activations. Compiled once per instruction set (see
// cpu/kernels-inl.h).
#pragma once

#include "cpu/kernels.h"

namespace h2o {
namespace {

// Calls body(load, store) for kWidth of n numbers at a time; load(p) loads from p + i.
template <class Body>
void for_vectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    body([i](const float* p) { return load(p + i); }, [i](float* p, Vec v) { store(p + i, v); });
  }
  if (i < n) {
    body([i, n](const float* p) { return load_first(p + i, n - i); },
         [i, n](float* p, Vec v) { store_first(p + i, v, n - i); });
  }
}

void add_to(float* y, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, add(load(y + i), load(x + i)));
  for (; i < n; ++i) y[i] += x[i];
}

void raise(float* y, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, max(load(y + i), load(x + i)));
  for (; i < n; ++i) y[i] = y[i] > x[i] ? y[i] : x[i];
}

void scale(float* x, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, mul(load(x + i), broadcast(factor)));
  for (; i < n; ++i) x[i] *= factor;
}

void rotate(float* x, const float* rope_table, int64_t n_rot, bool pairs) {
  const int64_t half = n_rot / 2;
  const int64_t apart = pairs ? 1 : half;
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    Vec a, b;
    if (pairs) {
      load_even_odd(x + 2 * i, a, b);
    } else {
      a = load(x + i), b = load(x + half + i);
    }
    const Vec cosine = load(rope_table + i), sine = load(rope_table + half + i);
    const Vec first = sub(mul(a, cosine), mul(b, sine));
    const Vec second = add(mul(a, sine), mul(b, cosine));
    if (pairs) {
      store_even_odd(x + 2 * i, first, second);
    } else {
      store(x + i, first);
      store(x + half + i, second);
    }
  }
  for (; i < half; ++i) {
    float* pair = x + (pairs ? 2 * i : i);
    const float a = pair[0];
    const float b = pair[apart];
    pair[0] = a * rope_table[i] - b * rope_table[half + i];
    pair[apart] = a * rope_table[half + i] + b * rope_table[i];
  }
}

typedef int32_t Lanes __attribute__((vector_size(64)));

// The lowest importance so far: per lane, or overall (T = int32_t).
template <class T>
struct Lowest {
  T key = T{} + 0x7fffffff;  // greater than every finite importance
  T position = T{} - 1;
  T index = T{} - 1;

  void see(const T& other, const T& at, const T& i, const T& counts) {
    const T better = counts & ((other < key) | ((other == key) & (at > position)));
    key = better ? other : key;
    position = better ? at : position;
    index = better ? i : index;
  }

  void load(const float* importances, const int32_t* positions, const T& i,
            const Evictable& evictable) {
    T other = {};
    // as integers with the same order as the floats, none of which is NaN
    if (importances != nullptr) {
      __builtin_memcpy(&other, importances, sizeof(T));
      other ^= (other >> 31) & 0x7fffffff;
    }
    T at;
    __builtin_memcpy(&at, positions, sizeof(T));
    const auto& [begin, end, tail_begin, tail_end] = evictable;
    see(other, at, i, (at >= begin) & (at < end) & ((at < tail_begin) | (at >= tail_end)));
  }
};

int64_t lowest(const float* importances, const int32_t* positions, int64_t n,
               const Evictable& evictable) {
  constexpr int kLanes = sizeof(Lanes) / sizeof(int32_t);
  constexpr int kChains = 2;  // independent dependency chains
  const auto from = [&](int64_t i) { return importances == nullptr ? nullptr : importances + i; };
  Lanes index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
  Lowest<Lanes> chains[kChains];
  int64_t i = 0;
  while (i + kChains * kLanes <= n) {
    for (Lowest<Lanes>& chain : chains) {
      chain.load(from(i), positions + i, index, evictable);
      i += kLanes;
      index += kLanes;
    }
  }
  Lowest<int32_t> all;
  for (const Lowest<Lanes>& chain : chains) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int32_t at = chain.index[lane];
      all.see(chain.key[lane], chain.position[lane], at, at >= 0);
    }
  }
  for (; i < n; ++i) all.load(from(i), positions + i, static_cast<int32_t>(i), evictable);
  return all.index;
}

// Finds the largest of kTogether numbers at a time, then its index.
int64_t argmax(const float* x, int64_t n) {
  constexpr int64_t kTogether = 16 * kWidth;
  int64_t best = 0;  // NaN sorts below every number
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (x[i] > x[best] || (x[best] != x[best] && x[i] == x[i])) best = i;
    }
  };
  look(0, n < kTogether ? n : kTogether);
  int64_t i = kTogether;
  for (; i + kTogether <= n; i += kTogether) {
    Vec largest = broadcast(x[best]);
    for (int64_t j = 0; j < kTogether; j += kWidth) largest = max(load(x + i + j), largest);
    if (!(maximum(largest) <= x[best])) look(i, i + kTogether);
  }
  look(i, n);
  return best;
}

void relu(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, max(load(x + i), zero()));
  for (; i < n; ++i) x[i] = x[i] > 0 ? x[i] : 0;
}

void relu_squared(float* x, int64_t n) {
  const auto squared = [](Vec v) {
    v = max(v, zero());
    return mul(v, v);
  };
  for_vectors(n, [&](const auto& load, const auto& store) { store(x, squared(load(x))); });
}

// e^x = 2^n (1 + r + r^2 p) for x <= 0: x = n ln 2 + r, a polynomial on |r| <= ln 2 / 2
// (coefficients from Cephes' expf).
struct Power {
  Vec n, r, p;
};

// Clamped at e^-70, so that probabilities are never denormal.
Power power(Vec x) {
  // Also removes NaN: scores must be ordered.
  x = min(max(x, broadcast(-70.0f)), zero());
  const Vec n = round(mul(x, broadcast(1.44269504f)));
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return {n, r, p};
}

// e^x for x <= 0, to about 1 ulp
Vec exp_negative(Vec x) {
  const auto [n, r, p] = power(x);
  return times_power_of_two(fma(mul(p, r), r, add(r, broadcast(1.0f))), n);
}

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n,
                float eps) {
  const int64_t whole = n - n % kWidth;
  Vec sums = zero();
  for (int64_t i = 0; i < whole; i += kWidth) sums = add(sums, load(x + i));
  float total = sum(sums);
  for (int64_t i = whole; i < n; ++i) total += x[i];
  const float mean = total / static_cast<float>(n);

  sums = zero();
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec centered = sub(load(x + i), broadcast(mean));
    sums = fma(centered, centered, sums);
  }
  float squares = sum(sums);
  for (int64_t i = whole; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);

  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec normal = mul(sub(load(x + i), broadcast(mean)), broadcast(scale));
    store(y + i, fma(normal, load(weight + i), load(bias + i)));
  }
  for (int64_t i = whole; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

void rms_norm(float* y, const float* x, const float* weight, int64_t n, float eps) {
  const int64_t whole = n - n % kWidth;
  Vec sums = zero();
  for (int64_t i = 0; i < whole; i += kWidth) sums = fma(load(x + i), load(x + i), sums);
  float squares = sum(sums);
  for (int64_t i = whole; i < n; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);

  for (int64_t i = 0; i < whole; i += kWidth) {
    store(y + i, mul(mul(load(x + i), broadcast(scale)), load(weight + i)));
  }
  for (int64_t i = whole; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

// 1 / (1 + e^-z) without overflow: with e = e^-|z|, that is 1 / (1 + e) or, below 0, e / (1 + e).
Vec sigmoid(Vec z) {
  const Vec e = exp_negative(min(z, sub(zero(), z)));
  // 1 where z > 0, except where z is so small that e is 1
  const Vec positive = min(mul(z, broadcast(3.4e38f)), broadcast(1.0f));
  return div(max(e, positive), add(broadcast(1.0f), e));
}

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u)
Vec gelu_tanh(Vec x) {
  const Vec cube = mul(mul(x, x), x);
  const Vec u = mul(fma(cube, broadcast(0.044715f), x), broadcast(2 * 0.7978845608f));
  return mul(x, sigmoid(u));
}

void gelu_tanh(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, gelu_tanh(load(x + i)));
  if (i < n) store_first(x + i, gelu_tanh(load_first(x + i, n - i)), n - i);
}

// e^(t^2) erfc(t) for t from 0 to 8.5: a minimax approximation, accurate to 4e-9.
Vec scaled_erfc(Vec t) {
  Vec p = broadcast(0.0312341545f);
  p = fma(p, t, broadcast(0.22171542f));
  p = fma(p, t, broadcast(0.715785027f));
  p = fma(p, t, broadcast(1.22320879f));
  p = fma(p, t, broadcast(1.0f));
  Vec q = broadcast(0.0553600974f);
  q = fma(q, t, broadcast(0.393015027f));
  q = fma(q, t, broadcast(1.29584992f));
  q = fma(q, t, broadcast(2.3692615f));
  q = fma(q, t, broadcast(2.35158825f));
  q = fma(q, t, broadcast(1.0f));
  return div(p, q);
}

// x / 2 * (1 + erf(x / sqrt(2))) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)). Not erff, whose last
// bits differ between C libraries.
Vec gelu_erf(Vec x) {
  // Beyond 12 the product is negligible. min() returns the second argument if one is NaN.
  const Vec magnitude = min(broadcast(12.0f), max(x, sub(zero(), x)));
  const Vec t = mul(magnitude, broadcast(0.70710678f));
  const Vec erfc = mul(exp_negative(sub(zero(), mul(t, t))), scaled_erfc(t));
  return sub(max(x, zero()), mul(mul(broadcast(0.5f), magnitude), erfc));
}

void gelu_erf(float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, gelu_erf(load(x + i)));
  if (i < n) store_first(x + i, gelu_erf(load_first(x + i, n - i)), n - i);
}

void clamp(float* x, int64_t n, float limit) {
  const Vec most = broadcast(limit), least = broadcast(-limit);
  for_vectors(
      n, [&](const auto& load, const auto& store) { store(x, min(max(load(x), least), most)); });
}

void xielu(float* x, int64_t n, float alpha_p, float alpha_n, float beta, float eps) {
  const auto f = [=](Vec v) {
    const Vec above = max(v, zero()), below = min(v, zero());
    const auto [n, r, p] = power(min(below, broadcast(eps)));
    // e^x - 1 to about 1 ulp
    const Vec less_one = add(times_power_of_two(fma(mul(p, r), r, r), n),
                             sub(times_power_of_two(broadcast(1), n), broadcast(1)));
    const Vec negative = sub(broadcast(1), min(mul(above, broadcast(3.4e38f)), broadcast(1)));
    const Vec left = mul(mul(broadcast(alpha_n), sub(less_one, below)), negative);
    const Vec right = mul(mul(broadcast(alpha_p), above), above);
    return fma(broadcast(beta), v, add(left, right));
  };
  for_vectors(n, [&](const auto& load, const auto& store) { store(x, f(load(x))); });
}

// A rational approximation for |x| up to 7.9, beyond which it is 1 (from Eigen), accurate to a few
// ulp near 0 too.
Vec tanh(Vec x) {
  x = min(max(x, broadcast(-7.90531110763549805f)), broadcast(7.90531110763549805f));
  const Vec square = mul(x, x);
  Vec p = broadcast(-2.76076847742355e-16f);
  p = fma(p, square, broadcast(2.00018790482477e-13f));
  p = fma(p, square, broadcast(-8.60467152213735e-11f));
  p = fma(p, square, broadcast(5.12229709037114e-08f));
  p = fma(p, square, broadcast(1.48572235717979e-05f));
  p = fma(p, square, broadcast(6.37261928875436e-04f));
  p = fma(p, square, broadcast(4.89352455891786e-03f));
  Vec q = broadcast(1.19825839466702e-06f);
  q = fma(q, square, broadcast(1.18534705686654e-04f));
  q = fma(q, square, broadcast(2.26843463243900e-03f));
  q = fma(q, square, broadcast(4.89352518554385e-03f));
  return div(mul(x, p), q);
}

void softcap(float* x, int64_t n, float cap) {
  const auto capped = [=](Vec v) { return mul(broadcast(cap), tanh(mul(v, broadcast(1 / cap)))); };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(x + i, capped(load(x + i)));
  if (i < n) store_first(x + i, capped(load_first(x + i, n - i)), n - i);
}

// up = f(up, gate)
template <class F>
void zip(float* up, const float* gate, int64_t n, const F& f) {
  for_vectors(n, [&](const auto& load, const auto& store) { store(up, f(load(up), load(gate))); });
}

void multiply(float* y, const float* x, int64_t n) {
  zip(y, x, n, [](Vec a, Vec b) { return mul(a, b); });
}

void geglu(float* up, const float* gate, int64_t n) {
  zip(up, gate, n, [](Vec u, Vec g) { return mul(gelu_tanh(g), u); });
}

void swiglu(float* up, const float* gate, int64_t n) {
  zip(up, gate, n, [](Vec u, Vec g) { return mul(mul(g, sigmoid(g)), u); });
}

void sigmoid_gate(float* up, const float* gate, int64_t n) {
  zip(up, gate, n, [](Vec u, Vec g) { return mul(u, sigmoid(g)); });
}

void swiglu_clamped(float* up, const float* gate, int64_t n) {
  const auto clamped = [](Vec u, Vec g) {
    g = min(g, broadcast(7));
    u = min(max(u, broadcast(-7)), broadcast(7));
    return mul(mul(g, sigmoid(mul(g, broadcast(1.702f)))), add(u, broadcast(1)));
  };
  zip(up, gate, n, clamped);
}

}  // namespace
}  // namespace h2o
