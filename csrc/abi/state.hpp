// state.hpp - the state blob: the learned state of a head, the same bytes on every machine.
//
//   offset  0  "KBTS"
//           4  u32  format version
//           8  u64  length of the whole blob
//          16  u32  CRC-32 of everything from offset 24
//          20  u32  0
//          24  configuration, samples, and how many numbers of noise; then members, or for each filter its noise and
//              for each layer means (n x (m+1)), D, columns of U above the diagonal; then what a bank keeps
//
// All little-endian, IEEE 754. The order of the factors is that of the mathematics, not of the arena, so layouts may
// change without touching the format.
#pragma once

#include "head.hpp"

namespace kbt {

constexpr std::uint32_t kStateMagic = 0x5354424BU;  // "KBTS"
constexpr std::uint32_t kStateVersion = 3;  // 1: without drift, one filter; 2: any constant noise may be a matrix
constexpr std::size_t kHeaderBytes = 24;

// CRC-32 of `count` bytes that follow others with the CRC `crc`.
inline std::uint32_t crc32(const unsigned char *bytes, std::size_t count, std::uint32_t crc = 0) {
  static constexpr std::uint32_t kTable[16] = {
      // reflected polynomial 0xEDB88320, four bits at a time
      0x00000000U, 0x1DB71064U, 0x3B6E20C8U, 0x26D930ACU, 0x76DC4190U, 0x6B6B51F4U, 0x4DB26158U, 0x5005713CU,
      0xEDB88320U, 0xF00F9344U, 0xD6D6A3E8U, 0xCB61B38CU, 0x9B64C2B0U, 0x86D3D2D4U, 0xA00AE278U, 0xBDBDF21CU};
  crc = ~crc;
  for (std::size_t i = 0; i < count; ++i) {
    crc ^= bytes[i];
    crc = (crc >> 4) ^ kTable[crc & 15U];
    crc = (crc >> 4) ^ kTable[crc & 15U];
  }
  return ~crc;
}

// Passes numbers as bytes to a sink, in pieces, the last one with flush(). Without a sink it only counts them.
class Writer {
 public:
  explicit Writer(kbt_sink *sink = nullptr, void *context = nullptr) : sink_(sink), context_(context) {}
  template <class U>
  void integer(U value) {
    for (std::size_t i = 0; i < sizeof(U); ++i) {
      piece_[used_++ % sizeof piece_] = static_cast<unsigned char>(value >> (8 * i) & 0xFFU);
      if (used_ % sizeof piece_ == 0) hand_over(sizeof piece_);
    }
  }
  void i32(std::int32_t value) { integer(static_cast<std::uint32_t>(value)); }
  void real(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    integer(bits);
  }
  void real(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    integer(bits);
  }
  void flush() { hand_over(used_ % sizeof piece_); }
  std::size_t used() const { return used_; }

 private:
  void hand_over(std::size_t count) {
    if (sink_ != nullptr && count != 0) sink_(context_, piece_, count);
  }

  kbt_sink *sink_;
  void *context_;
  std::size_t used_ = 0;
  unsigned char piece_[64];
};

// Reads up to the end. Beyond it, numbers read as 0 and the failure is remembered.
class Reader {
 public:
  Reader(const unsigned char *bytes, std::size_t count) : bytes_(bytes), count_(count) {}
  template <class U>
  U integer() {
    U value = 0;
    if (count_ - used_ < sizeof(U)) {
      short_ = true;
      return value;
    }
    for (std::size_t i = 0; i < sizeof(U); ++i, ++used_)
      value = static_cast<U>(value | static_cast<U>(bytes_[used_]) << (8 * i));
    return value;
  }
  std::int32_t i32() { return static_cast<std::int32_t>(integer<std::uint32_t>()); }
  void real(float &value) {
    const auto bits = integer<std::uint32_t>();
    std::memcpy(&value, &bits, sizeof value);
  }
  void real(double &value) {
    const auto bits = integer<std::uint64_t>();
    std::memcpy(&value, &bits, sizeof value);
  }
  bool complete() const { return !short_ && used_ == count_; }
  bool truncated() const { return short_; }
  std::size_t used() const { return used_; }
  // The same bytes once more, from `offset` on.
  Reader again(std::size_t offset) const { return {bytes_ + offset, count_ - offset}; }

 private:
  const unsigned char *bytes_;
  std::size_t count_, used_ = 0;
  bool short_ = false;
};

// The oldest format that describes the head, so that its bytes stay what they were.
inline std::uint32_t version_of(const kbt_config &cfg) {
  const bool several = cfg.widths[cfg.layers] > 1;
  return cfg.covariance == KBT_SHARED || cfg.noise == KBT_NOISE_MATRIX ||
                 (cfg.noise == KBT_NOISE_CONSTANT && several && has_bank(cfg))
             ? 3
             : 2;
}

// Calls visit(field) for every number of a configuration, in the order of the format.
template <class Config, class Visit>
KBT_SELDOM void visit_config(Config &cfg, std::uint32_t version, Visit visit) {
  for (auto *x : {&cfg.dtype, &cfg.layers}) visit(*x);
  for (auto &width : cfg.widths) visit(width);
  for (auto *x :
       {&cfg.max_rows, &cfg.output, &cfg.covariance, &cfg.rule, &cfg.noise, &cfg.relu_order, &cfg.softmax_order}) {
    visit(*x);
  }
  for (auto &var : cfg.prior_var) visit(var);
  for (auto *x : {&cfg.noise_var, &cfg.input_var, &cfg.forgetting, &cfg.gate}) visit(*x);
  if (version > 1) visit(cfg.drift);
}

inline void write_config(Writer &out, const kbt_config &cfg) {
  struct {
    Writer &out;
    void operator()(std::int32_t x) const { out.i32(x); }
    void operator()(double x) const { out.real(x); }
  } visit{out};
  visit_config(cfg, version_of(cfg), visit);
}

inline void read_config(Reader &in, std::uint32_t version, kbt_config &cfg) {
  struct {
    Reader &in;
    void operator()(std::int32_t &x) const { x = in.i32(); }
    void operator()(double &x) const { in.real(x); }
  } visit{in};
  visit_config(cfg, version, visit);
}

// Calls visit(value) for every learned number of a layer, in the order of the format.
template <class T, class Mean, class Variance, class Correlation>
KBT_SELDOM void visit_layer(const Posterior<T> &w, Mean mean, Variance variance, Correlation correlation) {
  for (Index j = 0; j < w.n; ++j) {
    for (Index p = 0; p < w.M1; ++p) mean(w.mean[p * w.stride + j]);
  }
  for (Index g = 0; g < w.matrices(); ++g) {
    for (Index p = 0; p < w.M(); ++p) variance(w.D(g, p));
    for (Index q = 1; w.structure != KBT_DIAGONAL && q < w.M(); ++q) {
      for (Index p = 0; p < q; ++p) correlation(w.U(g, p, q));
    }
  }
}

// Everything after the header, and unless more follows, the end.
template <class T>
KBT_SELDOM void write_body(const Head<T> &head, Writer &out, bool last = true) {
  write_config(out, head.cfg);
  out.integer(head.samples);
  const Index noise_count = head.noise().count();
  out.i32(static_cast<std::int32_t>(noise_count));
  const auto put = [&](T x) { out.real(x); };
  const auto put_bounded = [&](T x, double, double) { out.real(x); };
  for (Index i = 0; i < noise_count; ++i) out.real(head.noise().values[i]);
  const Bank<T> &bank = head.bank();
  if (head.has_members()) head.store().visit(put, put, put, put_bounded);
  for (Index k = 0; !head.has_members() && k < bank.count(); ++k) {
    for (Index i = 0; k > 0 && i < noise_count; ++i) out.real(bank.filter(k).noise().values[i]);
    for (Index i = 0; i < head.layers(); ++i) visit_layer(bank.filter(k).weights(i), put, put, put);
  }
  if (!head.has_members() && bank.several()) bank.visit_extra(noise_count != head.outputs(), put, put, put_bounded);
  if (last) out.flush();
}

inline void write_header(Writer &out, std::uint32_t magic, std::uint32_t version, std::size_t body, std::uint32_t crc) {
  out.integer(magic);
  out.integer(version);
  out.integer(static_cast<std::uint64_t>(kHeaderBytes + body));
  out.integer(crc);
  out.integer(std::uint32_t{0});
}

// A sink whose context is a std::uint32_t: the CRC-32 of all bytes so far.
inline void add_to_crc(void *sum, const void *bytes, std::size_t count) {
  auto &so_far = *static_cast<std::uint32_t *>(sum);
  so_far = crc32(static_cast<const unsigned char *>(bytes), count, so_far);
}

// The body is generated twice, because its CRC comes first. So no memory beside the head is needed.
template <class T>
void write_state(const Head<T> &head, kbt_sink *sink, void *context) {
  std::uint32_t crc = 0;
  Writer judge(add_to_crc, &crc);
  write_body(head, judge);
  Writer header(sink, context), body(sink, context);
  write_header(header, kStateMagic, version_of(head.cfg), judge.used(), crc);
  header.flush();
  write_body(head, body);
}

// Checks magic, version, length and CRC. Versions from `oldest` to `known` are read.
inline kbt_status check_header(const unsigned char *blob, std::size_t size, std::uint32_t magic, std::uint32_t oldest,
                               std::uint32_t known, std::uint32_t &version) {
  if (size < 4) return KBT_E_BLOB_SHORT;
  Reader header(blob, size < kHeaderBytes ? size : kHeaderBytes);
  if (header.integer<std::uint32_t>() != magic) return KBT_E_BLOB_FOREIGN;
  version = header.integer<std::uint32_t>();
  const auto length = header.integer<std::uint64_t>();
  const auto crc = header.integer<std::uint32_t>(), spare = header.integer<std::uint32_t>();
  if (header.truncated()) return KBT_E_BLOB_SHORT;
  if (version > known) return KBT_E_BLOB_VERSION;
  if (version < oldest) return KBT_E_BLOB_FOREIGN;
  if (length > size) return KBT_E_BLOB_SHORT;
  if (length != size || spare != 0) return KBT_E_BLOB_CRC;
  return crc32(blob + kHeaderBytes, size - kHeaderBytes) == crc ? KBT_OK : KBT_E_BLOB_CRC;
}

// The same for a state, whose configuration goes to `cfg`. Version 1 had no members: its drift is 0. Before version 3
// constant noise had room for a matrix.
inline kbt_status read_header(const unsigned char *blob, std::size_t size, kbt_config &cfg, std::uint32_t &version) {
  const kbt_status status = check_header(blob, size, kStateMagic, 1, kStateVersion, version);
  if (status != KBT_OK) return status;
  Reader body(blob + kHeaderBytes, size - kHeaderBytes);
  read_config(body, version, cfg);
  body.integer<std::uint64_t>();
  const std::int64_t count = body.i32();
  if (body.truncated()) return KBT_E_BLOB_SHORT;
  if (cfg.layers < 1 || cfg.layers > KBT_MAX_LAYERS) return KBT_E_BLOB_VALUE;  // an index below
  const bool newer = cfg.covariance == KBT_SHARED || cfg.noise == KBT_NOISE_MATRIX;
  if (version > 2 ? version_of(cfg) != version : newer) return KBT_E_BLOB_VALUE;
  if (version > 2 || cfg.noise != KBT_NOISE_CONSTANT) return KBT_OK;
  const std::int64_t n = cfg.widths[cfg.layers];
  if (n > 1 && (has_bank(cfg) || count == n * n)) cfg.noise = KBT_NOISE_MATRIX;
  return KBT_OK;
}

// Equal bit for bit.
inline bool same_config(const kbt_config &a, const kbt_config &b) {
  static_assert(
      sizeof(kbt_config) == (9 + KBT_MAX_LAYERS + 1) * sizeof(std::int32_t) + (KBT_MAX_LAYERS + 5) * sizeof(double),
      "no padding, whose bytes could be anything");
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// Numbers of a MemberStore, as a double.
inline double member_numbers(const kbt_config &cfg) {
  const double M = cfg.widths[0] + 1.0, O = cfg.widths[1], noise = cfg.noise == KBT_NOISE_FULL ? O * O : O;
  const double member = O * M + M + M * (M - 1.0) / 2.0 + noise + 1.0;  // eight of them, and the one that is kept
  return 9.0 * member + O * M + noise + 8.0 + MemberStore<float>::kBook;
}

// Bytes of a state with this configuration and this many numbers of noise, as a double, which cannot wrap around.
KBT_SELDOM inline double state_bytes(const kbt_config &cfg, double noise_count, std::uint32_t version) {
  const double real = cfg.dtype == KBT_FLOAT64 ? 8.0 : 4.0;
  std::size_t config = 0;
  visit_config(cfg, version, [&](auto x) { config += sizeof x; });
  const double fixed = static_cast<double>(kHeaderBytes + config + sizeof(std::uint64_t) + sizeof(std::int32_t));
  if (has_members(cfg)) return fixed + real * (noise_count + member_numbers(cfg));
  double numbers = noise_count;
  for (int i = 0; i < cfg.layers; ++i) {
    const double n = cfg.widths[i + 1], m = cfg.widths[i] + 1.0;
    const bool one = cfg.covariance == KBT_FULL || cfg.covariance == KBT_SHARED;
    const double M = cfg.covariance == KBT_FULL ? n * m : m, matrices = one ? 1.0 : n;
    numbers += n * m + matrices * (cfg.covariance == KBT_DIAGONAL ? M : M * (M + 1.0) / 2.0);
  }
  if (has_bank(cfg)) numbers = Bank<float>::kMost * numbers + Bank<float>::extra_numbers(cfg);
  return fixed + real * numbers;
}

template <class T>
std::size_t state_size(const Head<T> &head) {
  return static_cast<std::size_t>(
      state_bytes(head.cfg, static_cast<double>(head.noise().count()), version_of(head.cfg)));
}

// Takes the numbers of a layer from `in`. False if they cannot be a posterior. Factors can be finite and their product
// U D U' not: then an update would write infinite means. With every term of a variance below `most`, the variances are
// finite, and so are the covariances.
template <class T, class Take>
bool read_layer(const Posterior<T> &w, Reader &in, Take take) {
  constexpr T kAny = std::numeric_limits<T>::lowest();
  const T most = std::numeric_limits<T>::max() / T(w.M());
  std::size_t first = 0;                 // where D of this matrix begins
  Index seen = w.M(), row = 0, col = 1;  // entries of D read so far; the next place in U
  bool valid = true;
  visit_layer(
      w, [&](T &x) { take(x, kAny); },
      [&](T &x) {
        if (seen == w.M()) first = in.used(), seen = 0, row = 0, col = 1;
        ++seen;
        valid = valid && take(x, T(0)) <= most;
      },
      [&](T &x) {
        const T u = take(x, kAny);
        T D = T(0);
        if (!in.truncated()) in.again(first + static_cast<std::size_t>(col) * sizeof(T)).real(D);
        valid = valid && u * D * u <= most;
        if (++row == col) row = 0, ++col;
      });
  return valid;
}

// Two passes over the same bytes: the first checks, the second writes.
template <class T>
KBT_SELDOM kbt_status read_state(Head<T> &head, const unsigned char *blob, std::size_t size) {
  kbt_config cfg{};
  std::uint32_t version = 0;
  const kbt_status status = read_header(blob, size, cfg, version);
  if (status != KBT_OK) return status;
  if (!same_config(cfg, head.cfg)) return KBT_E_BLOB_CONFIG;
  constexpr T kAny = std::numeric_limits<T>::lowest();
  for (const bool commit : {false, true}) {
    Reader in(blob + kHeaderBytes, size - kHeaderBytes);
    read_config(in, version, cfg);  // it is the head's, by read_header
    const auto samples = in.integer<std::uint64_t>();
    const Index count = in.i32(), n = head.outputs();
    if (count != n && !(count == n * n && head.cfg.noise == KBT_NOISE_MATRIX)) return KBT_E_BLOB_VALUE;
    bool valid = true;
    const auto take = [&](T &to, T lowest) {
      T x;
      in.real(x);
      valid = valid && is_finite(x) && x >= lowest;
      if (commit) to = x;
      return x;
    };
    const auto read_noise = [&](NoiseModel<T> &noise) {
      T *const found = head.noise_candidate();
      for (Index i = 0; i < count; ++i) in.real(found[i]);
      valid = valid && (commit || noise.valid(found, count));
      for (Index i = 0; i < n; ++i) valid = valid && found[count == n ? i : i * n + i] >= T(kNoiseFloor);
      if (commit) noise.restore(found, count);
    };
    const auto take_noise = [&](T &x) { take(x, T(kNoiseFloor)); };
    const auto take_bounded = [&](T &x, double least, double highest) {
      valid = take(x, T(least)) <= T(highest) && valid;
    };
    read_noise(head.noise());
    if (!valid) return KBT_E_BLOB_VALUE;
    if (head.has_members()) {
      const T most = std::numeric_limits<T>::max() / T(head.store().M);
      head.store().visit([&](T &x) { take(x, kAny); }, [&](T &x) { valid = take(x, T(0)) <= most && valid; },
                         take_noise, take_bounded);
    }
    for (Index k = 0; !head.has_members() && k < head.bank().count(); ++k) {
      if (k > 0) read_noise(head.bank().filter(k).noise());
      for (Index i = 0; i < head.layers(); ++i) valid = read_layer(head.bank().filter(k).weights(i), in, take) && valid;
    }
    if (!head.has_members() && head.bank().several()) {
      head.bank().visit_extra(
          count != n, [&](T &x) { take(x, kAny); }, take_noise, take_bounded);
    }
    if (!in.complete() || !valid) return KBT_E_BLOB_VALUE;
    if (commit) {
      head.samples = samples;
      head.predicted_rows = 0;
      head.watch = {};
    }
  }
  return KBT_OK;
}

}  // namespace kbt
