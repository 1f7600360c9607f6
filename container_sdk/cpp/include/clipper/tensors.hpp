// Several named tensors in a row: records (docs/wire.md, "Several named tensors: records").

#ifndef CLIPPER_TENSORS_HPP
#define CLIPPER_TENSORS_HPP

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <clipper/model.hpp>

namespace clipper {

constexpr std::size_t TENSORS_MAX = 64, TENSOR_RANK_MAX = 8, TENSOR_NAME_MAX = 128;
constexpr std::uint64_t RECORD_BYTES_MAX = std::uint64_t{1} << 30;
constexpr std::uint32_t FREE = 0;  // a size that each row has for itself

// A record that is damaged, or does not fit its schema. The text names the tensor.
class InvalidRecord : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// One tensor of a schema. shape: sizes; FREE for those that differ from row to row.
struct TensorSpec {
  std::string name;
  DType dtype = DType::ANY;
  std::vector<std::uint32_t> shape;

  bool is_text() const { return dtype == DType::STR || dtype == DType::BYTES; }
};

namespace detail {

inline bool is_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned first = byte(i);
    const std::size_t more = first < 0x80 ? 0 : first < 0xc2 ? 9 : first < 0xe0 ? 1
                             : first < 0xf0 ? 2 : first < 0xf5 ? 3 : 9;
    if (more > 3 || text.size() - i <= more) return false;
    for (std::size_t k = 1; k <= more; k++)
      if (byte(i + k) >> 6 != 2) return false;
    if (more >= 2) {
      const unsigned second = byte(i + 1);
      if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
          (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
        return false;
    }
    i += more + 1;
  }
  return true;
}

// Reads a JSON object of strings.
class ObjectReader {
 public:
  explicit ObjectReader(std::string_view text) : text_(text) {}

  std::vector<std::pair<std::string, std::string>> read() {
    std::vector<std::pair<std::string, std::string>> members;
    expect('{');
    while (!next('}')) {
      if (!members.empty()) expect(',');
      std::string name = string();
      expect(':');
      members.emplace_back(std::move(name), string());
      if (members.size() > TENSORS_MAX) throw InvalidRecord("a schema has at most 64 tensors");
    }
    at_++;
    if (next('\0') || at_ < text_.size()) throw wrong();
    return members;
  }

 private:
  InvalidRecord wrong() const {
    return InvalidRecord("'" + std::string(text_) + "' is no schema: write {\"ids\": \"i64[*]\"}");
  }
  bool next(char c) {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) at_++;
    return at_ < text_.size() && text_[at_] == c;
  }
  void expect(char c) {
    if (!next(c)) throw wrong();
    at_++;
  }
  char take() {
    if (at_ == text_.size()) throw wrong();
    return text_[at_++];
  }
  unsigned hex4() {
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
      const char c = take();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) throw wrong();
      value = value << 4 | static_cast<unsigned>(digit);
    }
    return value;
  }
  static void put_utf8(unsigned code, std::string& to) {
    const auto put = [&](unsigned byte) { to.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | code >> 6);
      put(0x80 | (code & 63));
    } else {
      if (code < 0x10000) {
        put(0xe0 | code >> 12);
      } else {
        put(0xf0 | code >> 18);
        put(0x80 | (code >> 12 & 63));
      }
      put(0x80 | (code >> 6 & 63));
      put(0x80 | (code & 63));
    }
  }
  std::string string() {
    expect('"');
    std::string value;
    for (char c = take(); c != '"'; c = take()) {
      if (c != '\\') {
        value.push_back(c);
        continue;
      }
      c = take();
      if (c == 'u') {
        unsigned code = hex4();
        if (code >> 10 == 0x36 && take() == '\\' && take() == 'u')
          code = 0x10000 + ((code & 0x3ff) << 10) + (hex4() & 0x3ff);
        put_utf8(code, value);
      } else {
        value.push_back(c == 'n' ? '\n' : c == 't' ? '\t' : c);
      }
    }
    return value;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace detail

// The named tensors of a row, in order.
class Schema {
 public:
  // Parse a JSON object of types by name, as {"ids": "i64[*]", "mask": "i64[*]"}: what HELLO has as
  // input or output. Throws: InvalidRecord.
  static Schema parse(std::string_view json) {
    Schema schema;
    for (const auto& [name, type] : detail::ObjectReader(json).read()) {
      TensorSpec spec = parse_type(type);
      spec.name = name;
      if (name.empty() || name.size() > TENSOR_NAME_MAX)
        throw InvalidRecord("tensor '" + name + "': a name has 1 to 128 characters");
      schema.add(std::move(spec));
    }
    if (schema.specs_.empty()) throw InvalidRecord("a schema has at least one tensor");
    return schema;
  }

  const std::vector<TensorSpec>& specs() const { return specs_; }
  // True if all records have the same bytes in the same places.
  bool is_fixed() const { return numbers_ == 0; }
  // Bytes of a record of a fixed schema.
  std::uint64_t record_bytes() const { return record_bytes_; }
  // Number of u32 sizes at the start of a record.
  std::size_t numbers() const { return numbers_; }

  // The place of a tensor. Throws: InvalidRecord for a name that is unknown.
  std::size_t index(std::string_view name) const {
    for (std::size_t i = 0; i < specs_.size(); i++)
      if (specs_[i].name == name) return i;
    throw InvalidRecord("there is no tensor '" + std::string(name) + "'");
  }

 private:
  static TensorSpec parse_type(const std::string& text) {
    TensorSpec spec;
    const auto wrong = [&] { return InvalidRecord("'" + text + "' is not a type"); };
    const std::size_t bracket = text.find('[');
    const std::string name = text.substr(0, bracket);
    for (int i = 1; i <= DTYPE_MAX; i++)
      if (name == name_of(static_cast<DType>(i))) spec.dtype = static_cast<DType>(i);
    if (spec.dtype == DType::ANY) throw wrong();
    if (bracket == std::string::npos) return spec;
    std::size_t at = bracket + 1;
    for (;;) {
      std::uint64_t size = 0;
      const std::size_t start = at;
      if (at < text.size() && text[at] == '*') at++;
      else
        for (; at < text.size() && text[at] >= '0' && text[at] <= '9' && size < RECORD_BYTES_MAX; at++)
          size = size * 10 + static_cast<std::uint64_t>(text[at] - '0');
      const bool is_free = text[start] == '*';
      if (at == start || at >= text.size() || (!is_free && size == 0) || size > RECORD_BYTES_MAX ||
          spec.shape.size() == TENSOR_RANK_MAX)
        throw wrong();
      spec.shape.push_back(static_cast<std::uint32_t>(size));
      if (text[at] == ']' && at + 1 == text.size()) return spec;
      if (text[at++] != ',') throw wrong();
    }
  }

  void add(TensorSpec spec) {
    for (const TensorSpec& other : specs_)
      if (other.name == spec.name) throw InvalidRecord("tensor '" + spec.name + "' is named twice");
    std::uint64_t items = 1;
    for (const std::uint32_t size : spec.shape) {
      numbers_ += size == FREE;
      items *= std::max(size, 1u);
      if (items > RECORD_BYTES_MAX) throw InvalidRecord("a record has at most 1 GiB");
    }
    numbers_ += spec.is_text();
    record_bytes_ += detail::padded(items * item_bytes(spec.dtype));
    if (record_bytes_ > RECORD_BYTES_MAX) throw InvalidRecord("a record has at most 1 GiB");
    specs_.push_back(std::move(spec));
  }

  std::vector<TensorSpec> specs_;
  std::size_t numbers_ = 0;
  std::uint64_t record_bytes_ = 0;
};

// The tensors of one row, as views of its bytes.
class Record {
 public:
  // Read a record, aligned to 8 bytes. Throws: InvalidRecord.
  Record(const Schema& schema, std::string_view bytes) : schema_(schema) {
    const auto* at = reinterpret_cast<const std::uint8_t*>(bytes.data());
    if (schema.is_fixed() && bytes.size() != schema.record_bytes())
      throw InvalidRecord("a record has " + std::to_string(schema.record_bytes()) + " bytes, not " +
                          std::to_string(bytes.size()));
    const std::uint8_t* number = at;
    std::uint64_t left = bytes.size();
    skip(schema.specs()[0], at, left, schema.numbers() * std::uint64_t{4});
    for (const TensorSpec& spec : schema.specs()) {
      Part part;
      std::uint64_t items = 1;
      for (std::uint32_t size : spec.shape) {
        if (size == FREE) {
          size = detail::load<std::uint32_t>(number);
          number += 4;
        }
        part.shape.push_back(size);
        items *= size;
        if (items > bytes.size()) throw damaged(spec, "more elements than bytes");
      }
      part.items = items;
      part.bytes = items * item_bytes(spec.dtype);
      if (spec.is_text()) {
        part.bytes = detail::load<std::uint32_t>(number);
        number += 4;
      }
      part.data = at;
      skip(spec, at, left, part.bytes);
      check(spec, part);
      parts_.push_back(std::move(part));
    }
    if (left) throw InvalidRecord("a record has bytes behind its last tensor");
  }

  // The shape of a tensor in this row.
  const std::vector<std::uint32_t>& shape(std::string_view name) const {
    return parts_[schema_.index(name)].shape;
  }

  // The elements of a tensor of numbers, in C order. Throws: InvalidRecord for another type.
  template <class T> Span<T> values(std::string_view name) const {
    const std::size_t i = schema_.index(name);
    if (schema_.specs()[i].dtype != DTypeOf<T>::value)
      throw InvalidRecord("tensor '" + std::string(name) + "' is " +
                          name_of(schema_.specs()[i].dtype));
    return {reinterpret_cast<const T*>(parts_[i].data), static_cast<std::size_t>(parts_[i].items)};
  }

  // The elements of a tensor of str or bytes, in C order. Throws: InvalidRecord for another type.
  std::vector<std::string_view> texts(std::string_view name) const {
    const std::size_t i = schema_.index(name);
    const TensorSpec& spec = schema_.specs()[i];
    if (!spec.is_text()) throw InvalidRecord("tensor '" + spec.name + "' is " + name_of(spec.dtype));
    const Part& part = parts_[i];
    const auto* data = reinterpret_cast<const char*>(part.data);
    if (spec.shape.empty()) return {{data, static_cast<std::size_t>(part.bytes)}};
    std::vector<std::string_view> all;
    const char* at = data + 4 * part.items;
    for (std::uint64_t k = 0; k < part.items; k++) {
      const auto size = detail::load<std::uint32_t>(part.data + 4 * k);
      all.emplace_back(at, size);
      at += size;
    }
    return all;
  }

 private:
  struct Part {
    std::vector<std::uint32_t> shape;
    std::uint64_t items = 0, bytes = 0;
    const std::uint8_t* data = nullptr;
  };

  static InvalidRecord damaged(const TensorSpec& spec, const char* why) {
    return InvalidRecord("tensor '" + spec.name + "': " + why);
  }

  static void skip(const TensorSpec& spec, const std::uint8_t*& at, std::uint64_t& left,
                   std::uint64_t size) {
    if (size > left || detail::padded(size) > left)
      throw damaged(spec, "the record is shorter than its tensors");
    at += detail::padded(size);
    left -= detail::padded(size);
  }

  static void check(const TensorSpec& spec, const Part& part) {
    if (spec.dtype == DType::BOOL)
      for (std::uint64_t i = 0; i < part.bytes; i++)
        if (part.data[i] > 1) throw damaged(spec, "a bool is 0 or 1");
    if (!spec.is_text()) return;
    std::uint64_t start = 0;
    const std::string_view all(reinterpret_cast<const char*>(part.data), part.bytes);
    const auto element = [&](std::uint64_t size) {
      if (size > all.size() - start) throw damaged(spec, "its lengths go beyond its part");
      if (spec.dtype == DType::STR && !detail::is_utf8(all.substr(start, size)))
        throw damaged(spec, "a str is not UTF-8");
      start += size;
    };
    if (spec.shape.empty()) {
      element(part.bytes);
      return;
    }
    if (4 * part.items > part.bytes) throw damaged(spec, "no room for its lengths");
    start = 4 * part.items;
    for (std::uint64_t k = 0; k < part.items; k++)
      element(detail::load<std::uint32_t>(part.data + 4 * k));
    if (start != part.bytes) throw damaged(spec, "its lengths do not fill its part");
  }

  const Schema& schema_;
  std::vector<Part> parts_;
};

// Writes the tensors of one row. A tensor that is not given is of zeros, or empty texts, and its
// free sizes are 0.
class RecordWriter {
 public:
  explicit RecordWriter(const Schema& schema) : schema_(schema), parts_(schema.specs().size()) {
    for (std::size_t i = 0; i < parts_.size(); i++) {
      const TensorSpec& spec = schema.specs()[i];
      resize(i, spec.shape);
    }
  }

  // Have a tensor of `shape`, all zeros, whose elements the caller fills in, in C order; without a
  // shape, that of the schema. Throws: InvalidRecord for another type or shape.
  template <class T> T* values(std::string_view name, std::vector<std::uint32_t> shape = {}) {
    const std::size_t i = schema_.index(name);
    const TensorSpec& spec = schema_.specs()[i];
    if (spec.dtype != DTypeOf<T>::value)
      throw InvalidRecord("tensor '" + spec.name + "' is " + name_of(spec.dtype));
    resize(i, shape.empty() ? spec.shape : std::move(shape));
    return reinterpret_cast<T*>(parts_[i].data.data());
  }

  // Have a tensor of zeros, or of empty texts. Throws: InvalidRecord for another shape.
  void zeros(std::string_view name, const std::vector<std::uint32_t>& shape) {
    resize(schema_.index(name), shape);
  }

  // Set the elements of a tensor of str or bytes, in C order. Throws: InvalidRecord.
  void texts(std::string_view name, const std::vector<std::string_view>& elements,
             std::vector<std::uint32_t> shape = {}) {
    const std::size_t i = schema_.index(name);
    const TensorSpec& spec = schema_.specs()[i];
    if (!spec.is_text()) throw InvalidRecord("tensor '" + spec.name + "' is " + name_of(spec.dtype));
    if (shape.empty() && spec.shape.size() == 1)
      shape = {static_cast<std::uint32_t>(elements.size())};
    resize(i, shape.empty() ? spec.shape : std::move(shape));
    if (elements.size() != items(parts_[i].shape))
      throw InvalidRecord("tensor '" + spec.name + "': " + std::to_string(elements.size()) +
                          " texts do not fill its shape");
    parts_[i].text.clear();
    parts_[i].lengths.clear();
    for (const std::string_view element : elements) {
      parts_[i].lengths.push_back(static_cast<std::uint32_t>(element.size()));
      parts_[i].text.append(element);
    }
  }

  // The record. Throws: InvalidRecord above 1 GiB.
  std::string bytes() const {
    std::string to;
    for (std::size_t i = 0; i < parts_.size(); i++) {
      const TensorSpec& spec = schema_.specs()[i];
      for (std::size_t k = 0; k < spec.shape.size(); k++)
        if (spec.shape[k] == FREE) put(to, &parts_[i].shape[k], 4);
      if (!spec.is_text()) continue;
      const auto size = static_cast<std::uint32_t>(parts_[i].text.size() +
                                                   (spec.shape.empty() ? 0 : 4 * parts_[i].lengths.size()));
      put(to, &size, 4);
    }
    to.resize(detail::padded(to.size()));
    for (std::size_t i = 0; i < parts_.size(); i++) {
      const TensorSpec& spec = schema_.specs()[i];
      const Part& part = parts_[i];
      if (spec.is_text()) {
        if (!spec.shape.empty()) put(to, part.lengths.data(), 4 * part.lengths.size());
        to += part.text;
      } else {
        put(to, part.data.data(), items(part.shape) * item_bytes(spec.dtype));
      }
      to.resize(detail::padded(to.size()));
      if (to.size() > RECORD_BYTES_MAX) throw InvalidRecord("a record has at most 1 GiB");
    }
    return to;
  }

 private:
  struct Part {
    std::vector<std::uint32_t> shape;
    std::vector<std::uint64_t> data;  // of 64 bits, so that it is aligned for every type
    std::vector<std::uint32_t> lengths;
    std::string text;
  };

  static std::uint64_t items(const std::vector<std::uint32_t>& shape) {
    std::uint64_t product = 1;
    for (const std::uint32_t size : shape)
      if (__builtin_mul_overflow(product, std::uint64_t{size}, &product) ||
          product > RECORD_BYTES_MAX)
        throw InvalidRecord("a record has at most 1 GiB");
    return product;
  }

  static void put(std::string& to, const void* bytes, std::size_t size) {
    to.append(static_cast<const char*>(bytes), size);
  }

  void resize(std::size_t i, const std::vector<std::uint32_t>& shape) {
    const TensorSpec& spec = schema_.specs()[i];
    bool fits = shape.size() == spec.shape.size();
    for (std::size_t k = 0; fits && k < shape.size(); k++)
      fits = spec.shape[k] == FREE || spec.shape[k] == shape[k];
    if (!fits) throw InvalidRecord("tensor '" + spec.name + "' has another shape");
    parts_[i].shape = shape;
    const std::uint64_t count = items(shape);
    if (spec.is_text()) {
      parts_[i].lengths.assign(count, 0);
      parts_[i].text.clear();
    } else {
      parts_[i].data.assign((count * item_bytes(spec.dtype) + 7) / 8, 0);
    }
  }

  const Schema& schema_;
  std::vector<Part> parts_;
};

// Return the named tensors of row `i` of a batch. Throws: InvalidRecord.
inline Record record_of(const Schema& schema, const Batch& batch, std::size_t i) {
  if (!schema.is_fixed()) return Record(schema, batch.text(i));
  const auto row = batch.row<std::uint8_t>(i);
  return Record(schema, {reinterpret_cast<const char*>(row.data()), row.size()});
}

// Set the output of row `i`; call it for each row in order.
inline void put_record(const Schema& schema, const RecordWriter& record, Outputs& outputs,
                       std::size_t i) {
  const std::string bytes = record.bytes();
  if (schema.is_fixed()) outputs.put_fixed(i, bytes);
  else outputs.add_bytes(bytes);
}

// Generate a record: numbers from 0 to 1 for floats, zeros, short texts, 8 elements where free.
inline std::string make_record(const Schema& schema) {
  RecordWriter writer(schema);
  for (const TensorSpec& spec : schema.specs()) {
    std::vector<std::uint32_t> shape = spec.shape;
    std::size_t count = 1;
    for (auto& size : shape) {
      if (size == FREE) size = 8;
      count *= size;
    }
    if (spec.is_text()) {
      writer.texts(spec.name, std::vector<std::string_view>(count, "warm up"), shape);
    } else if (spec.dtype == DType::F32 || spec.dtype == DType::F64) {
      const double step = count > 1 ? 1.0 / static_cast<double>(count - 1) : 0.0;
      const bool is_float = spec.dtype == DType::F32;
      float* floats = is_float ? writer.values<float>(spec.name, shape) : nullptr;
      double* doubles = is_float ? nullptr : writer.values<double>(spec.name, shape);
      for (std::size_t i = 0; i < count; i++) {
        if (is_float) floats[i] = static_cast<float>(step * static_cast<double>(i));
        else doubles[i] = step * static_cast<double>(i);
      }
    } else {
      writer.zeros(spec.name, shape);
    }
  }
  return writer.bytes();
}

}  // namespace clipper

#endif
