// What a model receives and returns: Batch, Outputs, and the interface Model. evaluate() runs a batch.

#ifndef CLIPPER_MODEL_HPP
#define CLIPPER_MODEL_HPP

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <clipper/wire.hpp>

namespace clipper {

// The model returned something that cannot be sent. The batch fails with this text.
class InvalidOutput : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Consecutive elements that someone else owns.
template <class T> class Span {
 public:
  Span(const T* data, std::size_t size) : data_(data), size_(size) {}
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  const T* data_;
  std::size_t size_;
};

// The rows of a batch. Valid during the call that receives it only: copy what is needed longer.
class Batch {
 public:
  explicit Batch(const Rows& rows) : rows_(rows) {}

  // Number of rows.
  std::size_t size() const { return rows_.n; }
  DType dtype() const { return rows_.dtype; }
  // Shape of one row; {0} if rows differ in length.
  std::vector<std::uint32_t> shape() const {
    return {rows_.dims.begin(), rows_.dims.begin() + rows_.rank};
  }

  // All elements, row after row. Throws: std::invalid_argument if the rows have another type.
  template <class T> Span<T> values() const {
    if (DTypeOf<T>::value != rows_.dtype)
      throw std::invalid_argument(std::string("the rows are ") + name_of(rows_.dtype) + ", not " +
                                  name_of(DTypeOf<T>::value));
    return {reinterpret_cast<const T*>(rows_.data), rows_.data_bytes / sizeof(T)};
  }

  // The elements of row `i`. Throws: std::invalid_argument if the rows have another type.
  template <class T> Span<T> row(std::size_t i) const {
    const auto all = values<T>();
    if (rows_.variable)
      return {all.data() + rows_.offsets[i],
              static_cast<std::size_t>(rows_.offsets[i + 1] - rows_.offsets[i])};
    const std::size_t items = rows_.row_items();
    return {all.data() + i * items, items};
  }

  // The text or bytes of row `i`. Throws: std::invalid_argument for numbers.
  std::string_view text(std::size_t i) const {
    if (rows_.dtype != DType::STR && rows_.dtype != DType::BYTES)
      throw std::invalid_argument(std::string("the rows are ") + name_of(rows_.dtype) + ", not str");
    return {reinterpret_cast<const char*>(rows_.data) + rows_.offsets[i],
            static_cast<std::size_t>(rows_.offsets[i + 1] - rows_.offsets[i])};
  }

  // The session of row `i` (Options::sessions); 0 for none.
  std::uint64_t session(std::size_t i) const { return rows_.sessions ? rows_.sessions[i] : 0; }

 private:
  const Rows& rows_;
};

// The outputs of a batch: one of values(), add() for each row, and whatever else is known.
class Outputs {
 public:
  // Start anew for a batch of `n` rows.
  void reset(std::uint32_t n) {
    n_ = n;
    dtype_ = DType::ANY;
    rank_ = 0;
    dims_ = {};
    data_.clear();
    lengths_.clear();
    confidence_.clear();
    status_.clear();
    qualifiers_.clear();
    text_.clear();
  }

  // Have one output of `shape` per row, all zeros; a scalar without a shape. The pointer is valid
  // until the next call, and the caller fills in n x shape elements.
  template <class T> T* values(std::initializer_list<std::uint32_t> shape = {}) {
    if (shape.size() > RANK_MAX) throw InvalidOutput("outputs have at most 4 dimensions");
    dtype_ = DTypeOf<T>::value;
    rank_ = static_cast<std::uint8_t>(shape.size());
    dims_ = {};
    std::uint64_t size = n_ * sizeof(T);
    int i = 0;
    for (const std::uint32_t dim : shape) {
      dims_[i++] = dim;
      if (__builtin_mul_overflow(size, static_cast<std::uint64_t>(dim), &size) || size >> 40)
        throw InvalidOutput("outputs of more than 2^40 bytes");
    }
    lengths_.clear();
    data_.assign((size + 7) / 8, 0);
    data_bytes_ = size;
    return reinterpret_cast<T*>(data_.data());
  }

  // Add the output of the next row, a text.
  void add(std::string_view text) { append(DType::STR, text.data(), text.size(), text.size()); }
  // Add the output of the next row, bytes.
  void add_bytes(std::string_view bytes) {
    append(DType::BYTES, bytes.data(), bytes.size(), bytes.size());
  }
  // Add the output of the next row, `count` numbers; rows may differ in length.
  template <class T> void add(const T* values, std::size_t count) {
    append(DTypeOf<T>::value, values, count * sizeof(T), count);
  }

  // Set the output of row `row`, bytes of the same size for each row. Throws: InvalidOutput.
  void put_fixed(std::size_t row, std::string_view bytes) {
    if (dtype_ != DType::U8 || rank_ != 1 || dims_[0] != bytes.size()) {
      if (bytes.size() >> 32) throw InvalidOutput("outputs of more than 2^32 bytes");
      values<std::uint8_t>({static_cast<std::uint32_t>(bytes.size())});
    }
    if (row >= n_) throw InvalidOutput("row " + std::to_string(row) + " of " + std::to_string(n_));
    std::memcpy(reinterpret_cast<char*>(data_.data()) + row * bytes.size(), bytes.data(), bytes.size());
  }

  // The confidence of each row, from 0 to 1, for the caller to fill in.
  float* confidence() {
    confidence_.resize(n_);
    return confidence_.data();
  }

  // Mark a row as failed; its output is ignored.
  void fail(std::size_t row, const std::string& reason) {
    if (row >= n_) throw InvalidOutput("row " + std::to_string(row) + " of " + std::to_string(n_));
    status_.resize(n_);
    status_[row] = 1;
    if (text_.size() < TEXT_BYTES_MAX)
      text_ += (text_.empty() ? "" : "\n") + ("row " + std::to_string(row) + ": " + reason);
    if (text_.size() > TEXT_BYTES_MAX) text_.resize(TEXT_BYTES_MAX);
  }

  // Set what a decider may use beside the output of a row: a msgpack map, at most QUALIFIERS_MAX
  // bytes.
  void qualify(std::size_t row, std::string map) {
    if (row >= n_ || map.size() > QUALIFIERS_MAX) throw InvalidOutput("qualifiers above the limit");
    qualifiers_.resize(n_);
    qualifiers_[row] = std::move(map);
  }

  // Have the outputs of batches of one row each, in order. A row that failed alone fails here, and its
  // output is empty or zeros. Throws: InvalidOutput if their types or shapes differ (one dimension
  // may have any length); std::runtime_error if all failed.
  void join(const std::vector<Outputs>& rows) {
    const Outputs* first = nullptr;
    bool varies = false;
    for (const Outputs& one : rows) {
      if (one.has_failed()) continue;
      if (!first) first = &one;
      varies = varies || !one.lengths_.empty() || one.dims_ != first->dims_;
    }
    if (!first) throw std::runtime_error(rows.front().text_);
    reset(static_cast<std::uint32_t>(rows.size()));
    for (std::uint32_t i = 0; i < n_; i++) {
      const Outputs& one = rows[i];
      if (one.has_failed()) {
        fail(i, one.text_.substr(std::string_view("row 0: ").size()));
        if (varies) append(first->dtype_, nullptr, 0, 0);
        continue;
      }
      if (one.dtype_ != first->dtype_ || one.rank_ != first->rank_ || (varies && one.rank_ != 1))
        throw InvalidOutput("the outputs of the rows of a batch differ in type or shape: " +
                            first->type() + " and " + one.type());
      if (varies) {
        append(one.dtype_, one.data_.data(), one.data_bytes_, one.data_bytes_ / item_bytes(one.dtype_));
      } else {
        if (data_.empty()) {
          dtype_ = one.dtype_;
          rank_ = one.rank_;
          dims_ = one.dims_;
          data_bytes_ = n_ * one.data_bytes_;
          data_.assign((data_bytes_ + 7) / 8, 0);
        }
        std::copy_n(reinterpret_cast<const char*>(one.data_.data()), one.data_bytes_,
                    reinterpret_cast<char*>(data_.data()) + i * one.data_bytes_);
      }
      if (!one.confidence_.empty()) confidence()[i] = one.confidence_[0];
      if (!one.qualifiers_.empty()) qualify(i, one.qualifiers_[0]);
    }
  }

  // True if a row is marked as failed.
  bool has_failed() const { return !status_.empty(); }

  // Throws: InvalidOutput unless there is an output for each row.
  void check_count() const {
    if (dtype_ == DType::ANY || (!lengths_.empty() && lengths_.size() != n_))
      throw InvalidOutput("the model returned " + std::to_string(lengths_.size()) + " outputs for " +
                          std::to_string(n_) + " rows");
  }

  // The type of one output, as HELLO names it: "f64[10]", "str".
  std::string type() const {
    std::string name = name_of(dtype_);
    if (dtype_ >= DType::STR) return name;
    if (!lengths_.empty()) return name + "[*]";
    for (int i = 0; i < rank_; i++) name += (i ? "," : "[") + std::to_string(dims_[i]);
    return rank_ ? name + "]" : name;
  }

  // Return a REPLY as one run of bytes; with `partial`, several if the outputs are too large for
  // one frame. Throws: InvalidOutput.
  void encode(std::uint64_t id, std::uint64_t time_us, bool checked, bool qualifiers,
              std::uint64_t payload_bytes_max, std::vector<std::uint8_t>& to,
              bool partial = false) const {
    check_count();
    const std::uint32_t first = partial ? fitting(0, qualifiers, payload_bytes_max) : n_;
    encode_part({0, first, 0}, id, time_us, checked, qualifiers, payload_bytes_max, to);
    std::vector<std::uint8_t> frame;
    Part part{0, first, 0};
    while (part.end < n_) {
      part.at += bytes_of(part.start, part.end);
      part = {part.end, fitting(part.end, qualifiers, payload_bytes_max), part.at};
      encode_part(part, id, time_us, checked, qualifiers, payload_bytes_max, frame);
      to.insert(to.end(), frame.begin(), frame.end());
    }
  }

  // The outputs as n f64, for protocol version 1. Throws: InvalidOutput for anything else.
  std::vector<double> numbers() const {
    if (!lengths_.empty() || !status_.empty() || data_bytes_ != n_ * item_bytes(dtype_))
      throw InvalidOutput("version 1 takes one number per row");
    std::vector<double> all(n_);
    for (std::uint32_t i = 0; i < n_; i++) all[i] = number(i);
    return all;
  }

 private:
  static constexpr std::size_t TEXT_BYTES_MAX = 16 << 10;

  // Rows [start, end), whose data begins at byte `at`.
  struct Part {
    std::uint32_t start, end;
    std::uint64_t at;
  };

  std::uint64_t bytes_of(std::uint32_t start, std::uint32_t end) const {
    if (lengths_.empty()) return data_bytes_ / n_ * (end - start);
    std::uint64_t items = 0;
    for (std::uint32_t i = start; i < end; i++) items += lengths_[i];
    return items * item_bytes(dtype_);
  }

  // Return the end of the rows from `start` on that fit into one frame; of one row at least.
  std::uint32_t fitting(std::uint32_t start, bool qualifiers,
                        std::uint64_t payload_bytes_max) const {
    // of a row: a length, a confidence, a status
    constexpr std::uint64_t beside = 13;
    constexpr std::uint64_t padding = 64;
    std::uint64_t size = padding + (status_.empty() ? 0 : text_.size());
    std::uint32_t end = start;
    for (; end < n_; end++) {
      size += bytes_of(end, end + 1) + beside;
      if (qualifiers && !qualifiers_.empty()) size += qualifiers_[end].size();
      if (size > payload_bytes_max && end > start) break;
    }
    return end;
  }

  void encode_part(const Part& part, std::uint64_t id, std::uint64_t time_us, bool checked,
                   bool qualifiers, std::uint64_t payload_bytes_max,
                   std::vector<std::uint8_t>& to) const {
    const std::uint64_t rows = part.end - part.start, size = bytes_of(part.start, part.end);
    Header header;
    header.kind = Kind::REPLY;
    header.dtype = dtype_;
    header.rank = rank_;
    header.dims = dims_;
    header.rows = static_cast<std::uint32_t>(rows);
    header.id = id;
    header.time_us = time_us;
    header.flags = part.end < n_ ? PARTIAL : 0;
    to.resize(HEADER_BYTES);
    if (size > payload_bytes_max) throw too_large(size, payload_bytes_max);
    if (!lengths_.empty()) {
      header.flags |= VARIABLE;
      put(to, lengths_.data() + part.start, rows * 4);
    }
    const std::size_t begin = to.size();
    put(to, reinterpret_cast<const std::uint8_t*>(data_.data()) + part.at, size);
    for (std::size_t i = begin; dtype_ == DType::BOOL && i < begin + size; i++)
      to[i] = to[i] != 0;  // a mask of 0 and 255, for instance
    if (!confidence_.empty()) {
      header.flags |= CONFIDENCE;
      put(to, confidence_.data() + part.start, rows * 4);
    }
    if (qualifiers && !qualifiers_.empty()) {
      header.flags |= QUALIFIERS;
      put_qualifiers(to, part);
    }
    if (!status_.empty()) {
      header.flags |= ROW_STATUS;
      put(to, status_.data() + part.start, rows);
      to.insert(to.end(), text_.begin(), text_.end());
    }
    header.payload_bytes = to.size() - HEADER_BYTES;
    if (header.payload_bytes > payload_bytes_max)
      throw too_large(header.payload_bytes, payload_bytes_max);
    if (checked) {
      header.flags |= CHECKED;
      header.payload_crc = crc32(to.data() + HEADER_BYTES, header.payload_bytes);
    }
    encode_header(header, to.data());
  }

  static InvalidOutput too_large(std::uint64_t size, std::uint64_t limit) {
    return InvalidOutput("the outputs have " + std::to_string(size) + " bytes; the server's limit is " +
                         std::to_string(limit) + ". Return less, or lower batching.size_max.");
  }

  void append(DType dtype, const void* bytes, std::size_t size, std::size_t items) {
    if (lengths_.empty()) {
      dtype_ = dtype;
      rank_ = 1;
      dims_ = {};
      data_.clear();
      data_bytes_ = 0;
    }
    if (dtype_ != dtype || items >> 32)
      throw InvalidOutput("all outputs of a batch have one type, and below 2^32 elements");
    if (data_.size() * 8 < data_bytes_ + size)
      data_.resize(std::max(data_.size() * 2, (data_bytes_ + size + 7) / 8));
    if (size) std::memcpy(reinterpret_cast<std::uint8_t*>(data_.data()) + data_bytes_, bytes, size);
    data_bytes_ += size;
    lengths_.push_back(static_cast<std::uint32_t>(items));
  }

  static void put(std::vector<std::uint8_t>& to, const void* bytes, std::size_t size) {
    const auto* from = static_cast<const std::uint8_t*>(bytes);
    to.insert(to.end(), from, from + size);
    to.resize(detail::padded(to.size()));
  }

  void put_qualifiers(std::vector<std::uint8_t>& to, const Part& part) const {
    std::vector<std::uint32_t> lengths;
    std::string all;
    for (std::uint32_t i = part.start; i < part.end; i++) {
      const std::string& each = qualifiers_[i];
      lengths.push_back(static_cast<std::uint32_t>(each.size()));
      all += each;
    }
    put(to, lengths.data(), lengths.size() * 4);
    put(to, all.data(), all.size());
  }

  template <class T> double load_as(std::uint32_t i) const {
    return static_cast<double>(reinterpret_cast<const T*>(data_.data())[i]);
  }
  double number(std::uint32_t i) const {
    switch (dtype_) {
      case DType::BOOL: case DType::U8: return load_as<std::uint8_t>(i);
      case DType::I8: return load_as<std::int8_t>(i);
      case DType::U16: return load_as<std::uint16_t>(i);
      case DType::I16: return load_as<std::int16_t>(i);
      case DType::U32: return load_as<std::uint32_t>(i);
      case DType::I32: return load_as<std::int32_t>(i);
      case DType::U64: return load_as<std::uint64_t>(i);
      case DType::I64: return load_as<std::int64_t>(i);
      case DType::F32: return load_as<float>(i);
      case DType::F64: return load_as<double>(i);
      default: throw InvalidOutput("version 1 takes numbers of 8, 16, 32 or 64 bits");
    }
  }

  std::uint32_t n_ = 0;
  DType dtype_ = DType::ANY;
  std::uint8_t rank_ = 0;
  std::array<std::uint32_t, RANK_MAX> dims_{};
  std::vector<std::uint64_t> data_;  // of 64 bits, so that it is aligned for every type
  std::uint64_t data_bytes_ = 0;
  std::vector<std::uint32_t> lengths_;
  std::vector<float> confidence_;
  std::vector<std::uint8_t> status_;
  std::vector<std::string> qualifiers_;
  std::string text_;
};

// A model. One thread calls all methods. An exception of predict() fails its batch with its text, or
// with Options::retry_singly those rows that throw alone.
class Model {
 public:
  virtual ~Model() = default;
  // Prepare the model, once, before the container connects. An exception ends the process.
  virtual void load() {}
  // Evaluate a batch.
  virtual void predict(const Batch& batch, Outputs& outputs) = 0;
  // Learn from correct outputs (Options::corrects). Called when no batch waits.
  virtual void correct(const Batch& inputs, const Batch& labels) {
    (void)inputs;
    (void)labels;
  }
  // The model's own accuracy from 0 to 1, reported to the server; NaN if unknown.
  virtual double accuracy() { return std::numeric_limits<double>::quiet_NaN(); }
};

namespace detail {

// The text of the exception that is being handled. If it has several lines, the first is repeated
// at the end: a server shows the last.
inline std::string text_of_error() {
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::size_t end = text.find('\n');
    return end == std::string::npos ? text : text + '\n' + text.substr(0, end);
  } catch (...) {
    return "the model threw something that is no std::exception";
  }
}

// Row `i` of a batch, as a batch of one row.
inline Rows row_of(const Rows& rows, std::uint32_t i) {
  Rows one;
  one.dtype = rows.dtype;
  one.n = 1;
  one.rank = rows.rank;
  one.dims = rows.dims;
  one.variable = rows.variable;
  const std::uint64_t start = rows.variable ? rows.offsets[i] : i * rows.row_items();
  const std::uint64_t items = rows.variable ? rows.offsets[i + 1] - start : rows.row_items();
  if (rows.variable) one.offsets = {0, items};
  one.data = rows.data + start * item_bytes(rows.dtype);
  one.data_bytes = items * item_bytes(rows.dtype);
  if (rows.sessions) one.sessions = rows.sessions + i;
  return one;
}

inline void evaluate_singly(Model& model, const Rows& rows, Outputs& outputs) {
  std::vector<Outputs> singles(rows.n);
  for (std::uint32_t i = 0; i < rows.n; i++) {
    singles[i].reset(1);
    try {
      model.predict(Batch(row_of(rows, i)), singles[i]);
      if (!singles[i].has_failed()) singles[i].check_count();
    } catch (...) {
      singles[i].reset(1);
      singles[i].fail(0, text_of_error());
    }
  }
  outputs.join(singles);
}

}  // namespace detail

// Evaluate a batch. retry_singly: if the model throws, evaluate the rows one by one, and fail only
// those that throw again. Throws: what the model throws; InvalidOutput, for which nothing is tried
// again; std::runtime_error if each row failed.
inline void evaluate(Model& model, const Rows& rows, bool retry_singly, Outputs& outputs) {
  outputs.reset(rows.n);
  try {
    model.predict(Batch(rows), outputs);
    return;
  } catch (const InvalidOutput&) {
    throw;
  } catch (...) {
    if (!retry_singly || rows.n == 1) throw;
  }
  detail::evaluate_singly(model, rows, outputs);
}

}  // namespace clipper

#endif
