// Decodes frames, one per line of stdin: the protocol's version, a space, hexadecimal. Prints for
// each a line of JSON: what it means, and the frame encoded again, or {"error": TEXT}. A record is the
// version r, hexadecimal, a space and its schema.

#include <cinttypes>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>

#include <clipper/container.hpp>

using namespace clipper;

static std::string hex(std::string_view bytes) {
  std::string text;
  char two[3];
  for (const unsigned char byte : bytes) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

static std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    char four[8];
    if (c == '"' || c == '\\' || c < 32) {
      std::snprintf(four, sizeof four, "\\u%04x", c);
      out += four;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

template <class T> static std::string number(const std::uint8_t* at, std::uint64_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof value, sizeof value);
  char text[64];
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    std::snprintf(text, sizeof text, "%.17e", static_cast<double>(value));
    return text;
  } else {
    return std::to_string(value);
  }
}

static float half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  const float whole = static_cast<float>(exponent ? 1024 + fraction : fraction);
  return sign * std::ldexp(whole, exponent ? exponent - 25 : -24);
}

static std::string element(DType dtype, const std::uint8_t* at, std::uint64_t i) {
  switch (dtype) {
    case DType::BOOL: return at[i] ? "true" : "false";
    case DType::U8: return number<std::uint8_t>(at, i);
    case DType::I8: return number<std::int8_t>(at, i);
    case DType::U16: return number<std::uint16_t>(at, i);
    case DType::I16: return number<std::int16_t>(at, i);
    case DType::U32: return number<std::uint32_t>(at, i);
    case DType::I32: return number<std::int32_t>(at, i);
    case DType::U64: return number<std::uint64_t>(at, i);
    case DType::I64: return number<std::int64_t>(at, i);
    case DType::F32: return number<float>(at, i);
    case DType::F64: return number<double>(at, i);
    default: {
      std::uint16_t bits;
      std::memcpy(&bits, at + 2 * i, 2);
      const float value = half(bits);
      return number<float>(reinterpret_cast<const std::uint8_t*>(&value), 0);
    }
  }
}

static std::string nested(const Rows& rows, int depth, std::uint64_t& at) {
  if (depth == rows.rank) return element(rows.dtype, rows.data, at++);
  std::string text = "[";
  for (std::uint32_t i = 0; i < rows.dims[depth]; i++)
    text += (i ? "," : "") + nested(rows, depth + 1, at);
  return text + "]";
}

template <class T> static std::string list(std::uint64_t n, T text_of) {
  std::string text = "[";
  for (std::uint64_t i = 0; i < n; i++) text += (i ? "," : "") + text_of(i);
  return text + "]";
}

static std::string values(const Rows& rows) {
  if (!rows.variable) {
    if (!rows.data_bytes) return list(rows.n, [](std::uint64_t) { return std::string("[]"); });
    std::uint64_t at = 0;
    return list(rows.n, [&](std::uint64_t) { return nested(rows, 0, at); });
  }
  const Batch batch(rows);
  if (rows.dtype == DType::STR)
    return list(rows.n, [&](std::uint64_t i) { return quoted(batch.text(i)); });
  if (rows.dtype == DType::BYTES)
    return list(rows.n, [&](std::uint64_t i) { return quoted(hex(batch.text(i))); });
  return list(rows.n, [&](std::uint64_t i) {
    return list(rows.offsets[i + 1] - rows.offsets[i], [&](std::uint64_t k) {
      return element(rows.dtype, rows.data, rows.offsets[i] + k);
    });
  });
}

static std::string sessions(const Rows& rows) {
  return list(rows.n, [&](std::uint64_t i) { return std::to_string(rows.sessions[i]); });
}

static std::string described(const Rows& rows) {
  std::string text = ", \"values\": " + values(rows);
  if (rows.sessions) text += ", \"sessions\": " + sessions(rows);
  if (rows.confidence)
    text += ", \"confidence\": " + list(rows.n, [&](std::uint64_t i) {
              return number<float>(reinterpret_cast<const std::uint8_t*>(rows.confidence), i);
            });
  if (!rows.qualifiers.empty())
    text += ", \"qualifiers\": " +
            list(rows.n, [&](std::uint64_t i) { return quoted(hex(rows.qualifiers[i])); });
  if (rows.status)
    text += ", \"status\": " +
            list(rows.n, [&](std::uint64_t i) { return std::to_string(rows.status[i]); }) +
            ", \"text\": " + quoted(rows.text);
  return text;
}

// A REPLY again, through Outputs. Empty for what Outputs does not write.
template <class T> static void copy_values(const Rows& rows, Outputs& outputs) {
  T* to = nullptr;
  const auto& d = rows.dims;
  switch (rows.rank) {
    case 0: to = outputs.values<T>(); break;
    case 1: to = outputs.values<T>({d[0]}); break;
    case 2: to = outputs.values<T>({d[0], d[1]}); break;
    case 3: to = outputs.values<T>({d[0], d[1], d[2]}); break;
    default: to = outputs.values<T>({d[0], d[1], d[2], d[3]});
  }
  if (rows.data_bytes) std::memcpy(to, rows.data, rows.data_bytes);
}

static std::string again(const Header& header, const Rows& rows) {
  if (header.kind != Kind::REPLY) return "";
  Outputs outputs;
  outputs.reset(rows.n);
  const Batch batch(rows);
  for (std::uint32_t i = 0; rows.variable && i < rows.n; i++) {
    if (rows.dtype == DType::STR) outputs.add(batch.text(i));
    else if (rows.dtype == DType::BYTES) outputs.add_bytes(batch.text(i));
    else return "";
  }
  if (!rows.variable) switch (rows.dtype) {
      case DType::BOOL: copy_values<bool>(rows, outputs); break;
      case DType::U8: copy_values<std::uint8_t>(rows, outputs); break;
      case DType::I8: copy_values<std::int8_t>(rows, outputs); break;
      case DType::U16: copy_values<std::uint16_t>(rows, outputs); break;
      case DType::I16: copy_values<std::int16_t>(rows, outputs); break;
      case DType::U32: copy_values<std::uint32_t>(rows, outputs); break;
      case DType::I32: copy_values<std::int32_t>(rows, outputs); break;
      case DType::U64: copy_values<std::uint64_t>(rows, outputs); break;
      case DType::I64: copy_values<std::int64_t>(rows, outputs); break;
      case DType::F16: copy_values<Half>(rows, outputs); break;
      case DType::F32: copy_values<float>(rows, outputs); break;
      default: copy_values<double>(rows, outputs);
    }
  if (rows.confidence) std::memcpy(outputs.confidence(), rows.confidence, 4 * rows.n);
  for (std::uint32_t i = 0; i < rows.qualifiers.size(); i++)
    outputs.qualify(i, std::string(rows.qualifiers[i]));
  // Outputs writes the reasons in words of its own, and knows whether others follow.
  if (rows.status || header.flags & PARTIAL) return "";
  std::vector<std::uint8_t> frame;
  outputs.encode(header.id, header.time_us, header.flags & CHECKED, true, PAYLOAD_BYTES_MAX, frame);
  return hex({reinterpret_cast<const char*>(frame.data()), frame.size()});
}

template <class T>
static const std::uint8_t* copied(const Record& record, RecordWriter& writer, const TensorSpec& spec) {
  const auto from = record.values<T>(spec.name);
  const auto& shape = record.shape(spec.name);
  std::copy(from.begin(), from.end(), writer.values<T>(spec.name, shape));
  return reinterpret_cast<const std::uint8_t*>(from.data());
}

// The numbers of a tensor, which are copied to `writer`.
static const std::uint8_t* raw(const Record& record, RecordWriter& writer, const TensorSpec& spec) {
  switch (spec.dtype) {
    case DType::BOOL: return copied<bool>(record, writer, spec);
    case DType::U8: return copied<std::uint8_t>(record, writer, spec);
    case DType::I8: return copied<std::int8_t>(record, writer, spec);
    case DType::U16: return copied<std::uint16_t>(record, writer, spec);
    case DType::I16: return copied<std::int16_t>(record, writer, spec);
    case DType::U32: return copied<std::uint32_t>(record, writer, spec);
    case DType::I32: return copied<std::int32_t>(record, writer, spec);
    case DType::U64: return copied<std::uint64_t>(record, writer, spec);
    case DType::I64: return copied<std::int64_t>(record, writer, spec);
    case DType::F16: return copied<Half>(record, writer, spec);
    case DType::F32: return copied<float>(record, writer, spec);
    default: return copied<double>(record, writer, spec);
  }
}

// A copy of bytes in memory of exactly that size, so that a sanitizer sees a read beyond it.
static std::unique_ptr<std::uint8_t[]> exactly(const std::uint8_t* bytes, std::size_t size) {
  std::unique_ptr<std::uint8_t[]> copy(new std::uint8_t[size]);
  if (size) std::memcpy(copy.get(), bytes, size);
  return copy;
}

static std::string read_v2(const std::uint8_t* frame, std::size_t size) {
  if (size < HEADER_BYTES) throw BadFrame("a header has 64 bytes");
  const Header header = decode_header(frame);
  if (header.payload_bytes != size - HEADER_BYTES) throw BadFrame("the frame has another length");
  const std::uint8_t* payload = frame + HEADER_BYTES;
  const std::string_view text(reinterpret_cast<const char*>(payload), header.payload_bytes);
  std::string shown = "{\"kind\": " + quoted(name_of(header.kind)) + ", \"dtype\": " +
                     quoted(name_of(header.dtype)) + ", \"flags\": " + std::to_string(header.flags) +
                     ", \"rows\": " + std::to_string(header.rows) +
                     ", \"id\": " + std::to_string(header.id) +
                     ", \"time_us\": " + std::to_string(header.time_us) +
                     ", \"payload_crc\": " + std::to_string(header.payload_crc) + ", \"shape\": " +
                     list(header.rank, [&](std::uint64_t i) { return std::to_string(header.dims[i]); });
  const bool checked = header.flags & CHECKED;
  std::string encoded;
  if (header.flags & SHARED) {
    std::vector<Run> runs;
    open_runs(header, payload, runs);
    shown += ", \"runs\": " + list(runs.size(), [&](std::uint64_t i) {
              return "[" + std::to_string(runs[i].region) + "," + std::to_string(runs[i].first) + "," +
                     std::to_string(runs[i].rows) + "]";
            });
  } else if (header.kind == Kind::PREDICT || header.kind == Kind::REPLY) {
    Rows rows;
    open_rows(header, payload, rows);
    shown += described(rows);
    encoded = again(header, rows);
  } else if (header.kind == Kind::REGION) {
    const RegionInfo region = open_region(header, payload);
    shown += ", \"region\": " + std::to_string(region.number) +
            ", \"region_rows\": " + std::to_string(region.rows) +
            ", \"row_bytes\": " + std::to_string(region.row_bytes);
  } else if (header.kind == Kind::ACCURACY) {
    const Accuracy report = open_accuracy(header, payload);
    shown += ", \"learned\": " + std::to_string(report.learned) +
            ", \"failed\": " + std::to_string(report.failed) + ", \"accuracy\": " +
            (report.accuracy < 0 ? "null" : number<double>(
                reinterpret_cast<const std::uint8_t*>(&report.accuracy), 0));
    encoded = hex(control_frame(header.kind, pack_accuracy(report), header.id, checked));
  } else if (header.kind == Kind::FEEDBACK) {
    const Feedback feedback = open_feedback(header, payload);
    shown += ", \"inputs\": " + values(feedback.inputs) + ", \"labels\": " + values(feedback.labels) +
            ", \"sessions\": " + sessions(feedback.inputs);
  } else {
    check_payload(header, payload);
    if (header.kind == Kind::HELLO || header.kind == Kind::WELCOME) {
      const Map map = unpack_map(text);
      MapWriter writer(map.size());
      for (const auto& [key, value] : map) {
        if (value.type == MapValue::TEXT) writer.text(key, value.text);
        if (value.type == MapValue::BOOL) writer.boolean(key, value.number);
        if (value.type == MapValue::INT) writer.number(key, static_cast<std::uint64_t>(value.number));
      }
      encoded = hex(control_frame(header.kind, writer.bytes(), header.id, checked));
      if (header.kind == Kind::WELCOME) Welcome::read(map);
    } else {
      shown += ", \"text\": " + quoted(text);
      encoded = hex(control_frame(header.kind, text, header.id, checked));
    }
  }
  return shown + (encoded.empty() ? "" : ", \"again\": \"" + encoded + "\"") + "}";
}

static std::string read_v1(const std::uint8_t* frame, std::size_t size) {
  if (size < V1_HEAD_BYTES) throw BadFrame("a version 1 batch has at least 9 bytes");
  if (v1_content_bytes(frame) != size - V1_HEAD_BYTES)
    throw BadFrame("the batch has another length");
  const auto content = exactly(frame + V1_HEAD_BYTES, size - V1_HEAD_BYTES);
  Rows rows;
  open_v1(frame, content.get(), size - V1_HEAD_BYTES, rows);
  return "{\"values\": " + values(rows) + "}";
}

// A record: its tensors, and the record written again.
static std::string read_record(const std::string& json, const std::uint8_t* bytes, std::size_t size) {
  const Schema schema = Schema::parse(json);
  const auto copy = exactly(bytes, size);
  const Record record(schema, {reinterpret_cast<const char*>(copy.get()), size});
  RecordWriter writer(schema);
  std::string shown;
  for (const TensorSpec& spec : schema.specs()) {
    const auto shape = record.shape(spec.name);
    shown += (shown.empty() ? "{\"values\": {" : ", ") + quoted(spec.name) + ": ";
    std::uint64_t at = 0;
    std::vector<std::string_view> texts;
    if (spec.is_text()) {
      texts = record.texts(spec.name);
      writer.texts(spec.name, texts, shape);
    } else {
      writer.zeros(spec.name, shape);
    }
    const std::uint8_t* data = spec.is_text() ? nullptr : raw(record, writer, spec);
    const std::function<std::string(std::size_t)> nest = [&](std::size_t depth) {
      if (depth == shape.size()) {
        const std::uint64_t i = at++;
        if (!spec.is_text()) return element(spec.dtype, data, i);
        return quoted(spec.dtype == DType::STR ? std::string(texts[i]) : hex(texts[i]));
      }
      return list(shape[depth], [&](std::uint64_t) { return nest(depth + 1); });
    };
    shown += nest(0);
  }
  return shown + "}, \"again\": \"" + hex(writer.bytes()) + "\"}";
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::string bytes;
    const std::size_t end = std::min(line.find(' ', 2), line.size());
    for (std::size_t i = 2; i + 1 < end; i += 2)
      bytes.push_back(static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16)));
    const auto frame = exactly(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    const auto read = line[0] == '1' ? read_v1 : read_v2;
    try {
      if (line[0] == 'r')
        std::puts(read_record(line.substr(end + 1), frame.get(), bytes.size()).c_str());
      else
        std::puts(read(frame.get(), bytes.size()).c_str());
    } catch (const InvalidRecord& error) {
      std::puts(("{\"error\": " + quoted(error.what()) + "}").c_str());
    } catch (const BadFrame& error) {
      std::puts(("{\"error\": " + quoted(error.what()) + "}").c_str());
    }
  }
}
