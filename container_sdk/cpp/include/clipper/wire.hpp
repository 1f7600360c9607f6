// Frames of the wire protocol (docs/wire.md): headers, rows, control frames and version 1 batches.
//
// Pure functions on bytes; no sockets. Every length is compared with the bytes present and with a
// named limit before memory is reserved for it. Malformed bytes throw BadFrame.

#ifndef CLIPPER_WIRE_HPP
#define CLIPPER_WIRE_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire protocol is little-endian");

namespace clipper {

constexpr std::size_t HEADER_BYTES = 64;
constexpr int RANK_MAX = 4;
constexpr std::uint64_t PAYLOAD_BYTES_MAX = 64 << 20;
constexpr std::uint32_t ROWS_MAX = 1 << 20;
constexpr std::uint64_t CONTROL_BYTES_MAX = 1 << 16;  // payload of HELLO, WELCOME and REFUSE
constexpr std::uint32_t QUALIFIERS_MAX = 1024;        // bytes of qualifiers per row of a REPLY
constexpr std::size_t V1_HEAD_BYTES = 9;
constexpr int MSGPACK_DEPTH_MAX = 8;

// Malformed bytes. The connection that delivered them must be closed.
class BadFrame : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A frame exceeds a limit.
class FrameTooLarge : public BadFrame {
 public:
  using BadFrame::BadFrame;
};

enum class Kind : std::uint8_t {
  HELLO = 1, WELCOME, REFUSE, PREDICT, REPLY, FAILURE, HEARTBEAT, GOODBYE, REGION, FEEDBACK, ACCURACY
};
constexpr int KIND_MAX = 11;

enum class DType : std::uint8_t {
  ANY, BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F16, F32, F64, STR, BYTES
};
constexpr int DTYPE_MAX = 14;

// Flags of a frame.
constexpr std::uint16_t VARIABLE = 1, CONFIDENCE = 2, ROW_STATUS = 4, COMPRESSED = 8, CHECKED = 16,
                        SHARED = 32, SESSIONS = 64, QUALIFIERS = 128, PARTIAL = 256,
                        FLAGS_ALL = 511;

// A 16-bit float, as its bits.
struct Half {
  std::uint16_t bits;
};

// The element type of a C++ type.
template <class T> struct DTypeOf;
template <> struct DTypeOf<bool> { static constexpr DType value = DType::BOOL; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::U8; };
template <> struct DTypeOf<std::int8_t> { static constexpr DType value = DType::I8; };
template <> struct DTypeOf<std::uint16_t> { static constexpr DType value = DType::U16; };
template <> struct DTypeOf<std::int16_t> { static constexpr DType value = DType::I16; };
template <> struct DTypeOf<std::uint32_t> { static constexpr DType value = DType::U32; };
template <> struct DTypeOf<std::int32_t> { static constexpr DType value = DType::I32; };
template <> struct DTypeOf<std::uint64_t> { static constexpr DType value = DType::U64; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::I64; };
template <> struct DTypeOf<Half> { static constexpr DType value = DType::F16; };
template <> struct DTypeOf<float> { static constexpr DType value = DType::F32; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::F64; };

// Return the bytes of one element; 1 for str and bytes.
inline std::size_t item_bytes(DType dtype) {
  constexpr std::uint8_t SIZES[] = {0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 1, 1};
  return SIZES[static_cast<int>(dtype)];
}

// Return the name of an element type, as in "f64".
inline const char* name_of(DType dtype) {
  constexpr const char* NAMES[] = {"any", "bool", "u8",  "i8",  "u16", "i16", "u32",  "i32",
                                   "u64", "i64",  "f16", "f32", "f64", "str", "bytes"};
  return NAMES[static_cast<int>(dtype)];
}

// Return the name of a kind, as in "PREDICT".
inline const char* name_of(Kind kind) {
  constexpr const char* NAMES[] = {"",        "HELLO",     "WELCOME", "REFUSE", "PREDICT",  "REPLY",
                                   "FAILURE", "HEARTBEAT", "GOODBYE", "REGION", "FEEDBACK", "ACCURACY"};
  return NAMES[static_cast<int>(kind)];
}

namespace detail {

// Tables of CRC-32 (zlib), eight bytes at a time.
struct CrcTables {
  std::uint32_t table[8][256];
  CrcTables() : table{} {
    for (std::uint32_t i = 0; i < 256; i++) {
      std::uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      table[0][i] = c;
    }
    for (int t = 1; t < 8; t++)
      for (int i = 0; i < 256; i++)
        table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 0xff];
  }
};

template <class T> T load(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T> void store(std::uint8_t* at, T value) { std::memcpy(at, &value, sizeof value); }

inline std::uint64_t padded(std::uint64_t size) { return (size + 7) & ~std::uint64_t{7}; }

}  // namespace detail

// Return the CRC-32 (zlib) of bytes, continued from that of earlier ones.
inline std::uint32_t crc32(const std::uint8_t* at, std::size_t size, std::uint32_t crc = 0) {
  static const detail::CrcTables tables;
  const auto& t = tables.table;
  crc = ~crc;
  for (; size >= 8; size -= 8, at += 8) {
    std::uint64_t w = detail::load<std::uint64_t>(at) ^ crc;
    crc = t[7][w & 0xff] ^ t[6][w >> 8 & 0xff] ^ t[5][w >> 16 & 0xff] ^ t[4][w >> 24 & 0xff] ^
          t[3][w >> 32 & 0xff] ^ t[2][w >> 40 & 0xff] ^ t[1][w >> 48 & 0xff] ^ t[0][w >> 56];
  }
  for (; size; size--) crc = t[0][(crc ^ *at++) & 0xff] ^ (crc >> 8);
  return ~crc;
}

// Memory aligned to 64 bytes that grows; its bytes are not initialized.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  AlignedBytes(const std::uint8_t* bytes, std::size_t size) {
    reserve(size, 0);
    if (size) std::memcpy(data(), bytes, size);
  }

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Have at least `size` bytes and preserve the first `keep`.
  void reserve(std::size_t size, std::size_t keep) {
    if (size <= size_) return;
    std::unique_ptr<std::uint8_t[]> raw(new std::uint8_t[size + 63]);
    void* at = raw.get();
    std::size_t room = size + 63;
    auto* aligned = static_cast<std::uint8_t*>(std::align(64, size, at, room));
    if (keep) std::memcpy(aligned, data_, keep);
    raw_ = std::move(raw);
    data_ = aligned;
    size_ = size;
  }

 private:
  std::unique_ptr<std::uint8_t[]> raw_;
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

// -- headers

// The fields of a frame header.
struct Header {
  Kind kind = Kind::HEARTBEAT;
  DType dtype = DType::ANY;
  std::uint8_t rank = 0;
  std::uint16_t flags = 0;
  std::uint32_t rows = 0;
  std::uint64_t id = 0;
  std::array<std::uint32_t, RANK_MAX> dims{};
  std::uint64_t payload_bytes = 0;
  std::uint64_t time_us = 0;
  std::uint32_t payload_crc = 0;
};

// Encode a header as 64 bytes at `to`, including its CRC.
inline void encode_header(const Header& header, std::uint8_t* to) {
  std::memcpy(to, "CLPR\2", 5);
  to[5] = static_cast<std::uint8_t>(header.kind);
  to[6] = static_cast<std::uint8_t>(header.dtype);
  to[7] = header.rank;
  detail::store(to + 8, header.flags);
  detail::store<std::uint16_t>(to + 10, 0);
  detail::store(to + 12, header.rows);
  detail::store(to + 16, header.id);
  std::memcpy(to + 24, header.dims.data(), 16);
  detail::store(to + 40, header.payload_bytes);
  detail::store(to + 48, header.time_us);
  detail::store(to + 56, header.payload_crc);
  detail::store(to + 60, crc32(to, 60));
}

namespace detail {

inline void check_rows(const Header& header, std::uint32_t rows_max) {
  const int dtype = static_cast<int>(header.dtype);
  if (dtype == 0 || dtype > DTYPE_MAX) throw BadFrame("unknown dtype " + std::to_string(dtype));
  if (header.rank > RANK_MAX) throw BadFrame("wrong rank or dims");
  for (int i = header.rank; i < RANK_MAX; i++)
    if (header.dims[i]) throw BadFrame("wrong rank or dims");
  if (header.flags & VARIABLE) {
    if (header.rank != 1 || header.dims[0])
      throw BadFrame("rows that differ in length have rank 1 and dims 0");
  } else if (header.dtype >= DType::STR) {
    throw BadFrame("str and bytes rows are always VARIABLE");
  }
  if (header.flags & COMPRESSED && (header.dtype != DType::STR || header.kind != Kind::PREDICT))
    throw BadFrame("only the str rows of a PREDICT may be COMPRESSED");
  if (header.flags & SHARED && (header.kind != Kind::PREDICT || header.flags & ~(SHARED | CHECKED)))
    throw BadFrame("only the rows of one shape of a PREDICT may be SHARED, and nothing else");
  if (header.flags & SESSIONS && header.kind != Kind::PREDICT)
    throw BadFrame("only the rows of a PREDICT have sessions");
  if (header.flags & QUALIFIERS && header.kind != Kind::REPLY)
    throw BadFrame("only the rows of a REPLY have qualifiers");
  if (header.flags & PARTIAL && header.kind != Kind::REPLY)
    throw BadFrame("only a REPLY may be PARTIAL");
  if (header.rows == 0) throw BadFrame("a batch has at least one row");
  if (header.rows > rows_max)
    throw FrameTooLarge(std::to_string(header.rows) + " rows; the limit is " +
                        std::to_string(rows_max));
}

inline void check_control(const Header& header) {
  const std::string name = name_of(header.kind);
  if (header.dtype != DType::ANY || header.rank || header.rows || header.dims[0] || header.dims[1] ||
      header.dims[2] || header.dims[3] || header.flags & ~CHECKED)
    throw BadFrame(name + " carries no rows");
  const auto size = header.payload_bytes;
  if ((header.kind == Kind::HEARTBEAT || header.kind == Kind::GOODBYE) && size)
    throw BadFrame(name + " has no payload");
  if (header.kind == Kind::ACCURACY && size != 16 && size != 24)
    throw BadFrame("ACCURACY has 16 or 24 bytes, not " + std::to_string(size));
  if (header.kind == Kind::REGION && size != 24)
    throw BadFrame("REGION has 24 bytes, not " + std::to_string(size));
}

}  // namespace detail

// Decode and check the header in the 64 bytes at `at`. Throws: BadFrame, FrameTooLarge.
inline Header decode_header(const std::uint8_t* at,
                            std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX,
                            std::uint32_t rows_max = ROWS_MAX) {
  if (std::memcmp(at, "CLPR", 4)) throw BadFrame("not a clipper frame (wrong magic)");
  if (at[4] != 2)
    throw BadFrame("the server uses wire version " + std::to_string(at[4]) + ", this container 2");
  if (crc32(at, 60) != detail::load<std::uint32_t>(at + 60))
    throw BadFrame("header damaged (its CRC differs)");
  if (at[5] == 0 || at[5] > KIND_MAX) throw BadFrame("unknown kind " + std::to_string(at[5]));
  Header header;
  header.kind = static_cast<Kind>(at[5]);
  header.dtype = static_cast<DType>(at[6]);
  header.rank = at[7];
  header.flags = detail::load<std::uint16_t>(at + 8);
  header.rows = detail::load<std::uint32_t>(at + 12);
  header.id = detail::load<std::uint64_t>(at + 16);
  std::memcpy(header.dims.data(), at + 24, 16);
  header.payload_bytes = detail::load<std::uint64_t>(at + 40);
  header.time_us = detail::load<std::uint64_t>(at + 48);
  header.payload_crc = detail::load<std::uint32_t>(at + 56);
  if (detail::load<std::uint16_t>(at + 10) || header.flags & ~FLAGS_ALL)
    throw BadFrame("reserved bits are set");
  if (header.payload_crc && !(header.flags & CHECKED))
    throw BadFrame("a payload CRC without CHECKED");
  if (header.kind == Kind::PREDICT || header.kind == Kind::REPLY)
    detail::check_rows(header, rows_max);
  else
    detail::check_control(header);
  if (header.payload_bytes > payload_bytes_max)
    throw FrameTooLarge("payload of " + std::to_string(header.payload_bytes) +
                        " bytes; the limit is " + std::to_string(payload_bytes_max));
  return header;
}

// Check the CRC of a CHECKED payload. Throws: BadFrame.
inline void check_payload(const Header& header, const std::uint8_t* payload) {
  if (header.flags & CHECKED && crc32(payload, header.payload_bytes) != header.payload_crc)
    throw BadFrame("payload damaged (its CRC differs)");
}

// -- LZ4

// Decompress an LZ4 block into exactly `size` bytes at `to`. Throws: BadFrame.
inline void decode_lz4(const std::uint8_t* block, std::size_t block_bytes, std::uint8_t* to,
                       std::size_t size) {
  const std::uint8_t* const end = block + block_bytes;
  std::size_t at = 0;
  const auto damaged = [] { return BadFrame("damaged LZ4 block"); };
  const auto length_of = [&](std::size_t length) {
    if (length < 15) return length;
    for (;;) {
      if (block == end || length > size + 15) throw damaged();
      const std::uint8_t more = *block++;
      length += more;
      if (more != 255) return length;
    }
  };
  for (;;) {
    if (block == end) throw damaged();
    const std::uint8_t token = *block++;
    const std::size_t literals = length_of(token >> 4);
    if (literals > static_cast<std::size_t>(end - block) || literals > size - at) throw damaged();
    if (literals) std::memcpy(to + at, block, literals);
    block += literals;
    at += literals;
    if (block == end) break;
    if (end - block < 2) throw damaged();
    const std::size_t offset = detail::load<std::uint16_t>(block);
    block += 2;
    const std::size_t match = length_of(token & 15) + 4;
    if (offset == 0 || offset > at || match > size - at) throw damaged();
    for (std::size_t i = 0; i < match; i++) to[at + i] = to[at + i - offset];
    at += match;
  }
  if (at != size)
    throw BadFrame("an LZ4 block of " + std::to_string(at) + " bytes, " + std::to_string(size) +
                   " were announced");
}

namespace detail {

// Decompress strings of `size` bytes in total, which is compared with the limits first.
inline void open_strings(const std::uint8_t* block, std::uint64_t block_bytes, std::uint64_t size,
                         std::uint64_t payload_bytes_max, AlignedBytes& to) {
  if (size > payload_bytes_max)
    throw FrameTooLarge(std::to_string(size) + " bytes of strings; the limit is " +
                        std::to_string(payload_bytes_max));
  if (size > 255 * block_bytes)  // LZ4's largest ratio
    throw BadFrame("an LZ4 block of " + std::to_string(block_bytes) + " bytes cannot hold " +
                   std::to_string(size));
  to.reserve(size, 0);
  decode_lz4(block, block_bytes, to.data(), size);
}

}  // namespace detail

// -- rows

// The rows of a PREDICT or REPLY: pointers into the payload, or into `owned`.
//
// data: all elements, row after row. offsets: for rows of different lengths, the start of each row
// and the end of the last, in elements; else empty. Absent parts are null.
struct Rows {
  DType dtype = DType::ANY;
  std::uint32_t n = 0;
  std::uint8_t rank = 0;
  std::array<std::uint32_t, RANK_MAX> dims{};
  const std::uint8_t* data = nullptr;
  std::uint64_t data_bytes = 0;
  std::vector<std::uint64_t> offsets;
  const std::uint64_t* sessions = nullptr;
  const float* confidence = nullptr;
  const std::uint8_t* status = nullptr;
  std::string_view text;
  std::vector<std::string_view> qualifiers;
  bool variable = false;
  AlignedBytes owned;

  // Take type and shape from a header, and forget all parts.
  void describe(const Header& header) {
    dtype = header.dtype;
    n = header.rows;
    rank = header.rank;
    dims = header.dims;
    variable = header.flags & VARIABLE;
    data = nullptr;
    data_bytes = 0;
    sessions = nullptr;
    confidence = nullptr;
    status = nullptr;
    text = {};
    qualifiers.clear();
    offsets.clear();
  }

  // Elements of one row of a fixed shape.
  std::uint64_t row_items() const {
    std::uint64_t items = 1;
    for (int i = 0; i < rank; i++) items *= dims[i];
    return items;
  }
};

namespace detail {

// Reads the parts of a payload in order.
class Parts {
 public:
  Parts(const std::uint8_t* payload, std::uint64_t size) : payload_(payload), size_(size) {}

  const std::uint8_t* take(std::uint64_t size) {
    if (size > size_ - at_ || padded(size) > size_ - at_)
      throw BadFrame("the payload is shorter than its rows");
    const std::uint8_t* part = payload_ + at_;
    for (std::uint64_t i = size; i < padded(size); i++)
      if (part[i]) throw BadFrame("padding is not zero");
    at_ += padded(size);
    return part;
  }

  std::string_view rest() {
    std::string_view text(reinterpret_cast<const char*>(payload_ + at_), size_ - at_);
    at_ = size_;
    return text;
  }

  std::uint64_t left() const { return size_ - at_; }
  const std::uint8_t* here() const { return payload_ + at_; }

  void end() const {
    if (at_ != size_) throw BadFrame("the payload is longer than its rows");
  }

 private:
  const std::uint8_t* payload_;
  std::uint64_t size_, at_ = 0;
};

// Return the bytes of all rows of a fixed shape. Throws: BadFrame beyond 2^63.
inline std::uint64_t bytes_of(const Header& header) {
  std::uint64_t size = static_cast<std::uint64_t>(header.rows) * item_bytes(header.dtype);
  bool empty = false;
  for (int i = 0; i < header.rank; i++) {
    if (header.dims[i] == 0) empty = true;
    else if (__builtin_mul_overflow(size, static_cast<std::uint64_t>(header.dims[i]), &size) ||
             size >> 63)
      throw BadFrame("rows of more than 2^63 bytes");
  }
  return empty ? 0 : size;
}

inline void check_bools(const Rows& rows) {
  if (rows.dtype != DType::BOOL) return;
  for (std::uint64_t i = 0; i < rows.data_bytes; i++)
    if (rows.data[i] > 1) throw BadFrame("a bool is 0 or 1");
}

inline std::uint64_t add_up(const std::uint8_t* lengths, std::uint32_t n,
                            std::vector<std::uint64_t>& offsets) {
  offsets.resize(n + std::size_t{1});
  offsets[0] = 0;
  for (std::uint32_t i = 0; i < n; i++)
    offsets[i + 1] = offsets[i] + load<std::uint32_t>(lengths + std::size_t{4} * i);
  return offsets[n];
}

inline void open_qualifiers(Parts& parts, Rows& rows) {
  const std::uint8_t* lengths = parts.take(std::uint64_t{4} * rows.n);
  std::vector<std::uint64_t> offsets;
  const std::uint64_t size = add_up(lengths, rows.n, offsets);
  for (std::uint32_t i = 0; i < rows.n; i++)
    if (offsets[i + 1] - offsets[i] > QUALIFIERS_MAX)
      throw FrameTooLarge("qualifiers of " + std::to_string(offsets[i + 1] - offsets[i]) +
                          " bytes; the limit is " + std::to_string(QUALIFIERS_MAX));
  const char* data = reinterpret_cast<const char*>(parts.take(size));
  rows.qualifiers.reserve(rows.n);
  for (std::uint32_t i = 0; i < rows.n; i++)
    rows.qualifiers.emplace_back(data + offsets[i], offsets[i + 1] - offsets[i]);
}

}  // namespace detail

// Decode the payload of a PREDICT or REPLY into `rows`, which is overwritten.
//
// payload: header.payload_bytes bytes, aligned to 8; it must outlive `rows`.
// Throws: BadFrame, FrameTooLarge.
inline void open_rows(const Header& header, const std::uint8_t* payload, Rows& rows,
                      std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX) {
  if (header.flags & SHARED) throw BadFrame("SHARED rows, but WELCOME did not enable shared memory");
  check_payload(header, payload);
  detail::Parts parts(payload, header.payload_bytes);
  rows.describe(header);
  if (rows.variable) {
    const std::uint8_t* lengths = parts.take(std::uint64_t{4} * rows.n);
    rows.data_bytes = detail::add_up(lengths, rows.n, rows.offsets) * item_bytes(rows.dtype);
    if (header.flags & COMPRESSED) {
      if (parts.left() < 8) throw BadFrame("the payload is shorter than its rows");
      const auto block_bytes = detail::load<std::uint64_t>(parts.here());
      if (block_bytes > parts.left() - 8) throw BadFrame("the payload is shorter than its rows");
      const std::uint8_t* block = parts.take(8 + block_bytes) + 8;
      detail::open_strings(block, block_bytes, rows.data_bytes, payload_bytes_max, rows.owned);
      rows.data = rows.owned.data();
    } else {
      rows.data = parts.take(rows.data_bytes);
    }
  } else {
    rows.data_bytes = detail::bytes_of(header);
    rows.data = parts.take(rows.data_bytes);
  }
  detail::check_bools(rows);
  if (header.flags & SESSIONS)
    rows.sessions = reinterpret_cast<const std::uint64_t*>(parts.take(std::uint64_t{8} * rows.n));
  if (header.flags & CONFIDENCE)
    rows.confidence = reinterpret_cast<const float*>(parts.take(std::uint64_t{4} * rows.n));
  if (header.flags & QUALIFIERS) detail::open_qualifiers(parts, rows);
  if (header.flags & ROW_STATUS) {
    rows.status = parts.take(rows.n);
    for (std::uint32_t i = 0; i < rows.n; i++)
      if (rows.status[i] > 1) throw BadFrame("a row's status is 0 or 1");
    rows.text = parts.rest();
  }
  parts.end();
}

// -- rows in shared memory

// Rows of a region that a SHARED batch refers to.
struct Run {
  std::uint32_t region, rows;
  std::uint64_t first;
};

// Decode the runs of a SHARED batch. They are not yet checked against the regions. Throws:
// BadFrame.
inline void open_runs(const Header& header, const std::uint8_t* payload, std::vector<Run>& runs) {
  check_payload(header, payload);
  runs.clear();
  const std::uint64_t size = header.payload_bytes;
  if (size == 0 || size % 16)
    throw BadFrame(std::to_string(size) + " bytes are not a multiple of a run's 16");
  std::uint64_t total = 0;
  for (std::uint64_t at = 0; at < size; at += 16) {
    Run run{detail::load<std::uint32_t>(payload + at), detail::load<std::uint32_t>(payload + at + 4),
            detail::load<std::uint64_t>(payload + at + 8)};
    total += run.rows;
    if (run.rows == 0 || total > header.rows)
      throw BadFrame("the runs do not add up to " + std::to_string(header.rows) + " rows");
    runs.push_back(run);
  }
  if (total != header.rows)
    throw BadFrame("the runs do not add up to " + std::to_string(header.rows) + " rows");
}

// What a REGION announces.
struct RegionInfo {
  std::uint64_t number, rows, row_bytes;
};

// Decode the payload of a REGION. Throws: BadFrame.
inline RegionInfo open_region(const Header& header, const std::uint8_t* payload) {
  check_payload(header, payload);
  const RegionInfo region{detail::load<std::uint64_t>(payload),
                          detail::load<std::uint64_t>(payload + 8),
                          detail::load<std::uint64_t>(payload + 16)};
  if (region.number >> 32 || region.rows == 0 || region.row_bytes == 0)
    throw BadFrame("region " + std::to_string(region.number) + " of " + std::to_string(region.rows) +
                   " rows of " + std::to_string(region.row_bytes) + " bytes");
  return region;
}

// -- feedback and accuracy

// Inputs and their correct outputs. Owns its bytes.
struct Feedback {
  Rows inputs, labels;
  AlignedBytes inputs_bytes, labels_bytes;

  // The memory of its rows.
  std::uint64_t bytes() const {
    return inputs_bytes.size() + inputs.owned.size() + labels_bytes.size() + labels.owned.size();
  }
};

// Decode the payload of a FEEDBACK: a PREDICT with sessions, and a REPLY. Throws: BadFrame.
inline Feedback open_feedback(const Header& outer, const std::uint8_t* payload,
                              std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX) {
  check_payload(outer, payload);
  Feedback feedback;
  std::uint64_t left = outer.payload_bytes;
  const auto frame = [&](Kind kind, AlignedBytes& bytes, Rows& rows) {
    if (left < HEADER_BYTES) throw BadFrame("feedback is a PREDICT and a REPLY frame");
    const Header header = decode_header(payload, payload_bytes_max);
    if (header.kind != kind || header.payload_bytes > left - HEADER_BYTES)
      throw BadFrame(std::string("feedback is a PREDICT and a REPLY frame, not ") +
                     name_of(header.kind));
    bytes.reserve(header.payload_bytes, 0);
    if (header.payload_bytes)
      std::memcpy(bytes.data(), payload + HEADER_BYTES, header.payload_bytes);
    open_rows(header, bytes.data(), rows, payload_bytes_max);
    payload += HEADER_BYTES + header.payload_bytes;
    left -= HEADER_BYTES + header.payload_bytes;
  };
  frame(Kind::PREDICT, feedback.inputs_bytes, feedback.inputs);
  frame(Kind::REPLY, feedback.labels_bytes, feedback.labels);
  if (left || feedback.inputs.n != feedback.labels.n || !feedback.inputs.sessions)
    throw BadFrame("feedback has as many labels and sessions as inputs, and nothing else");
  return feedback;
}

// What a model that learns reports. accuracy: from 0 to 1; negative if unknown.
struct Accuracy {
  std::uint64_t learned = 0, failed = 0;
  double accuracy = -1.0;
};

inline bool operator==(const Accuracy& a, const Accuracy& b) {
  return a.learned == b.learned && a.failed == b.failed && a.accuracy == b.accuracy;
}

// Decode the payload of an ACCURACY. Throws: BadFrame.
inline Accuracy open_accuracy(const Header& header, const std::uint8_t* payload) {
  check_payload(header, payload);
  Accuracy report{detail::load<std::uint64_t>(payload), detail::load<std::uint64_t>(payload + 8), -1.0};
  if (header.payload_bytes == 24) {
    report.accuracy = detail::load<double>(payload + 16);
    if (!(report.accuracy >= 0.0 && report.accuracy <= 1.0))
      throw BadFrame("an accuracy of " + std::to_string(report.accuracy));
  }
  return report;
}

// Encode the payload of an ACCURACY.
inline std::string pack_accuracy(const Accuracy& report) {
  std::string payload(report.accuracy < 0 ? 16 : 24, '\0');
  auto* to = reinterpret_cast<std::uint8_t*>(payload.data());
  detail::store(to, report.learned);
  detail::store(to + 8, report.failed);
  if (report.accuracy >= 0) detail::store(to + 16, report.accuracy);
  return payload;
}

// Encode a frame without rows.
inline std::string control_frame(Kind kind, std::string_view payload = {}, std::uint64_t id = 0,
                                 bool checked = false) {
  Header header;
  header.kind = kind;
  header.id = id;
  header.payload_bytes = payload.size();
  if (checked) {
    header.flags = CHECKED;
    header.payload_crc =
        crc32(reinterpret_cast<const std::uint8_t*>(payload.data()), payload.size());
  }
  std::string frame(HEADER_BYTES, '\0');
  encode_header(header, reinterpret_cast<std::uint8_t*>(frame.data()));
  return frame.append(payload);
}

// -- msgpack

// A value of the maps of HELLO and WELCOME.
struct MapValue {
  enum Type { NIL, BOOL, INT, TEXT, OTHER } type = NIL;
  std::int64_t number = 0;
  std::string text;
};

using Map = std::vector<std::pair<std::string, MapValue>>;

// Writes msgpack, each value as short as it can be.
class MapWriter {
 public:
  explicit MapWriter(std::size_t fields) { size(fields, 0x80, 15, 0xde); }

  void text(std::string_view key, std::string_view value) {
    string(key);
    string(value);
  }
  void number(std::string_view key, std::uint64_t value) {
    string(key);
    integer(value);
  }
  void boolean(std::string_view key, bool value) {
    string(key);
    bytes_.push_back(value ? '\xc3' : '\xc2');
  }
  void pairs(std::string_view key,
             const std::vector<std::pair<std::uint64_t, std::uint64_t>>& values) {
    string(key);
    size(values.size(), 0x90, 15, 0xdc);
    for (const auto& [first, second] : values) {
      bytes_.push_back('\x92');
      integer(first);
      integer(second);
    }
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void big_endian(std::uint64_t value, int size) {
    for (int i = size - 1; i >= 0; i--) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
  void size(std::size_t count, unsigned fix, std::size_t fix_max, unsigned code16) {
    if (count <= fix_max) {
      bytes_.push_back(static_cast<char>(fix | count));
    } else {
      bytes_.push_back(static_cast<char>(code16));
      big_endian(count, 2);
    }
  }
  void string(std::string_view text) {
    if (text.size() < 32) {
      bytes_.push_back(static_cast<char>(0xa0 | text.size()));
    } else if (text.size() < 256) {
      bytes_.push_back('\xd9');
      big_endian(text.size(), 1);
    } else {
      bytes_.push_back('\xda');
      text = text.substr(0, 0xffff);
      big_endian(text.size(), 2);
    }
    bytes_.append(text);
  }
  void integer(std::uint64_t value) {
    if (value < 128) {
      big_endian(value, 1);
      return;
    }
    const int size = value < 1u << 8 ? 1 : value < 1u << 16 ? 2 : value >> 32 ? 8 : 4;
    bytes_.push_back(static_cast<char>(size == 1 ? 0xcc : size == 2 ? 0xcd : size == 4 ? 0xce : 0xcf));
    big_endian(value, size);
  }

  std::string bytes_;
};

namespace detail {

// Reads msgpack. Nesting and lengths are bounded by the bytes present.
class MapReader {
 public:
  explicit MapReader(std::string_view bytes) : bytes_(bytes) {}

  Map map() {
    std::uint64_t count = 0;
    if (!map_size(byte(), count)) throw wrong();
    Map fields;
    for (std::uint64_t i = 0; i < count; i++) {
      MapValue key = value(0);
      if (key.type != MapValue::TEXT) throw wrong();
      fields.emplace_back(std::move(key.text), value(0));
    }
    if (at_ != bytes_.size()) throw wrong();
    return fields;
  }

 private:
  static BadFrame wrong() { return BadFrame("the payload is not a msgpack map"); }

  unsigned byte() {
    if (at_ == bytes_.size()) throw wrong();
    return static_cast<unsigned char>(bytes_[at_++]);
  }
  std::uint64_t big_endian(int size) {
    std::uint64_t value = 0;
    for (int i = 0; i < size; i++) value = value << 8 | byte();
    return value;
  }
  std::string_view take(std::uint64_t size) {
    if (size > bytes_.size() - at_) throw wrong();
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  bool map_size(unsigned code, std::uint64_t& count) {
    if (code >> 4 == 8) count = code & 15;
    else if (code == 0xde || code == 0xdf) count = big_endian(code == 0xde ? 2 : 4);
    else return false;
    return true;
  }
  bool array_size(unsigned code, std::uint64_t& count) {
    if (code >> 4 == 9) count = code & 15;
    else if (code == 0xdc || code == 0xdd) count = big_endian(code == 0xdc ? 2 : 4);
    else return false;
    return true;
  }
  static MapValue integer(std::int64_t number) { return {MapValue::INT, number, {}}; }

  MapValue value(int depth) {
    if (depth > MSGPACK_DEPTH_MAX) throw wrong();
    const unsigned code = byte();
    std::uint64_t count = 0;
    if (code < 0x80) return integer(code);
    if (code >= 0xe0) return integer(static_cast<std::int8_t>(code));
    if (code >> 5 == 5) return {MapValue::TEXT, 0, std::string(take(code & 31))};
    if (map_size(code, count)) return skip(count, 2, depth);
    if (array_size(code, count)) return skip(count, 1, depth);
    switch (code) {
      case 0xc0: return {};
      case 0xc2: case 0xc3: return {MapValue::BOOL, code & 1, {}};
      case 0xc4: case 0xc5: case 0xc6: return other(big_endian(1 << (code - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return other(big_endian(1 << (code - 0xc7)) + 1);
      case 0xca: return other(4);
      case 0xcb: return other(8);
      case 0xcc: case 0xcd: case 0xce: case 0xcf: {
        const std::uint64_t number = big_endian(1 << (code - 0xcc));
        return number >> 63 ? MapValue{MapValue::OTHER, 0, {}}
                            : integer(static_cast<std::int64_t>(number));
      }
      case 0xd0: return integer(static_cast<std::int8_t>(big_endian(1)));
      case 0xd1: return integer(static_cast<std::int16_t>(big_endian(2)));
      case 0xd2: return integer(static_cast<std::int32_t>(big_endian(4)));
      case 0xd3: return integer(static_cast<std::int64_t>(big_endian(8)));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return other((std::uint64_t{1} << (code - 0xd4)) + 1);
      case 0xd9: case 0xda: case 0xdb:
        return {MapValue::TEXT, 0, std::string(take(big_endian(1 << (code - 0xd9))))};
      default: throw wrong();
    }
  }
  MapValue other(std::uint64_t size) {
    take(size);
    return {MapValue::OTHER, 0, {}};
  }
  MapValue skip(std::uint64_t count, int values, int depth) {
    for (std::uint64_t i = 0; i < count; i++)
      for (int k = 0; k < values; k++) value(depth + 1);
    return {MapValue::OTHER, 0, {}};
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
};

}  // namespace detail

// Decode the msgpack map of a HELLO or WELCOME. Throws: BadFrame.
inline Map unpack_map(std::string_view payload) { return detail::MapReader(payload).map(); }

// -- version 1

// Return how many bytes follow the first 9 of a version 1 batch. Throws: BadFrame, FrameTooLarge.
inline std::uint64_t v1_content_bytes(const std::uint8_t* head,
                                      std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX,
                                      std::uint32_t rows_max = ROWS_MAX) {
  const unsigned kind = head[0];
  const auto n = detail::load<std::uint32_t>(head + 1), length = detail::load<std::uint32_t>(head + 5);
  if (kind == 0 || kind > 7)
    throw BadFrame("unknown format " + std::to_string(kind) + " of a version 1 batch");
  if (n == 0) throw BadFrame("a batch has at least one row");
  if (n > rows_max)
    throw FrameTooLarge(std::to_string(n) + " rows; the limit is " + std::to_string(rows_max));
  const std::uint64_t item = kind == 1 ? 4 : kind == 2 ? 8 : 1;
  const std::uint64_t size = kind <= 3 ? std::uint64_t{n} * length * item : length;
  if (size > payload_bytes_max)
    throw FrameTooLarge("payload of " + std::to_string(size) + " bytes; the limit is " +
                        std::to_string(payload_bytes_max));
  return size;
}

namespace detail {

// Copy the rows of formats 4 to 6 into `rows.owned`.
inline void open_v1_variable(const std::uint8_t* content, std::uint64_t size, Rows& rows) {
  const std::uint64_t item = item_bytes(rows.dtype);
  rows.offsets.assign(1, 0);
  rows.owned.reserve(size, 0);
  std::uint64_t at = 0, to = 0;
  for (std::uint32_t i = 0; i < rows.n; i++) {
    if (size - at < 4) throw BadFrame("the content is shorter than its rows");
    const std::uint64_t length = load<std::uint32_t>(content + at);
    at += 4;
    if (length * item > size - at) throw BadFrame("the content is shorter than its rows");
    if (length) std::memcpy(rows.owned.data() + to, content + at, length * item);
    at += length * item;
    to += length * item;
    rows.offsets.push_back(rows.offsets.back() + length);
  }
  if (at != size) throw BadFrame("the content is longer than its rows");
  rows.data = rows.owned.data();
  rows.data_bytes = to;
}

}  // namespace detail

// Decode a version 1 batch from its first 9 bytes and its content into `rows`.
//
// content: v1_content_bytes(head) bytes, aligned to 8. Throws: BadFrame, FrameTooLarge.
inline void open_v1(const std::uint8_t* head, const std::uint8_t* content, std::uint64_t size,
                    Rows& rows, std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX) {
  constexpr DType TYPES[] = {DType::ANY, DType::I32, DType::F64, DType::U8,
                             DType::I32, DType::F64, DType::U8,  DType::STR};
  const unsigned kind = head[0];
  Header header;
  header.dtype = TYPES[kind];
  header.rows = detail::load<std::uint32_t>(head + 1);
  header.rank = 1;
  header.flags = kind > 3 ? VARIABLE : std::uint16_t{0};
  rows.describe(header);
  if (kind <= 3) {
    rows.dims[0] = detail::load<std::uint32_t>(head + 5);
    rows.data = content;
    rows.data_bytes = size;
    return;
  }
  if (std::uint64_t{4} * rows.n > size) throw BadFrame("the content is shorter than its rows");
  if (kind < 7) {
    detail::open_v1_variable(content, size, rows);
    return;
  }
  for (std::uint32_t i = 0; i < rows.n; i++)
    if (detail::load<std::int32_t>(content + std::size_t{4} * i) < 0)
      throw BadFrame("a negative length");
  rows.data_bytes = detail::add_up(content, rows.n, rows.offsets);
  const std::uint64_t lengths = std::uint64_t{4} * rows.n;
  detail::open_strings(content + lengths, size - lengths, rows.data_bytes, payload_bytes_max,
                       rows.owned);
  rows.data = rows.owned.data();
}

}  // namespace clipper

#endif
