// Runs a model as a replica of a clipper server.
//
//   #include <clipper/container.hpp>
//
//   struct Doubler : clipper::Model {
//     void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
//       double* to = outputs.values<double>();
//       for (std::size_t i = 0; i < batch.size(); i++) to[i] = 2 * batch.row<double>(i)[0];
//     }
//   };
//
//   int main() {
//     Doubler doubler;
//     return clipper::run(doubler, {"f64[1]", "f64"});
//   }
//
// `clipper deploy doubler --command ./doubler` starts the program with the environment variables
// that Options::from_environment reads (docs/sdk-cpp-java.md).

#ifndef CLIPPER_CONTAINER_HPP
#define CLIPPER_CONTAINER_HPP

#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <system_error>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <clipper/model.hpp>
#include <clipper/tensors.hpp>

namespace clipper {

constexpr const char* SDK = "cpp/1.0";
constexpr std::size_t READ_BYTES = 64 << 10;
constexpr double ATTEMPT_S = 10.0;  // to connect and to receive WELCOME
constexpr int SILENCE_HEARTBEATS = 6;
constexpr double BACKOFF_S_MIN = 0.1, BACKOFF_S_MAX = 10.0;
constexpr std::int64_t HEARTBEAT_MS_MAX = 3'600'000;
constexpr std::size_t FEEDBACK_FRAMES_MAX = 256;  // and as many bytes as one payload may have
constexpr std::size_t REGIONS_MAX = 128;
constexpr std::size_t DESCRIPTORS_MAX = 4;  // received ahead of their frames
constexpr std::int64_t SPIN_NS = 50'000;
constexpr int SPIN_SCORE_MAX = 16, SPIN_TRIAL = 64;
constexpr std::uint32_t WARMUP_ROWS_MAX = 256;
constexpr std::size_t WARMUP_TIMINGS_MAX = 24;
constexpr double WARMUP_S = 2.0, WARMUP_BATCH_S = 0.1;
constexpr std::uint64_t WARMUP_ITEMS_MAX = 1 << 24;
constexpr double LOOK_UP_S = 2.0;  // between two look-ups of the servers' names
constexpr std::size_t SERVERS_MAX = 1024;
constexpr double COMPLAIN_S = 5.0;  // the same failure is printed at most so often
constexpr int EXIT_USAGE = 2, EXIT_LOAD_FAILED = 3, EXIT_REJECTED = 4;

// The connection ended, or the server was silent for too long.
class Disconnected : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The server rejected this container. The text is its reason.
class ContainerRejected : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Shared memory was agreed on but cannot be mapped; the container reconnects without it.
class CannotShare : public BadFrame {
 public:
  using BadFrame::BadFrame;
};

// A stop of this process was requested.
struct Stopping {};

// How a model is served. input, output: types such as "f64[64]", "f32[*]", "str", "any".
//
// batch_max: most rows of a batch; 0 for no limit. corrects: the model learns from feedback.
// sessions: its rows have sessions. retry_singly: the rows of a batch that throws are evaluated one
// by one, and only those fail that throw again. protocol: 1 or 2, the format of the batches. warmup: "off", a
// PREDICT frame in base64 whose rows are run, or empty for generated rows. address: unix:/path or
// tcp:host:port; several with commas between them. all_servers: connect to every address that a
// host stands for. alive_file: touched with each heartbeat while a server is connected; empty for
// none. sharing: rows may arrive in shared memory.
struct Options {
  std::string input = "any", output = "any";
  std::uint32_t batch_max = 0;
  bool corrects = false, sessions = false, retry_singly = false;
  int protocol = 2;
  std::string name, address, token, warmup, alive_file;
  std::uint64_t version = 1, replica = 0;
  bool sharing = true, all_servers = false;

  Options() = default;
  Options(const char* input, const char* output = "any") : input(input), output(output) {}

  // Overwrite the fields that the environment names: CLIPPER_ADDRESS, CLIPPER_TOKEN (which is
  // removed) or CLIPPER_TOKEN_FILE, CLIPPER_MODEL, CLIPPER_VERSION, CLIPPER_REPLICA, CLIPPER_INPUT,
  // CLIPPER_OUTPUT, CLIPPER_BATCH_MAX, CLIPPER_RETRY_SINGLY, CLIPPER_PROTOCOL, CLIPPER_WARMUP,
  // CLIPPER_ALL_SERVERS, CLIPPER_ALIVE_FILE. Throws: std::invalid_argument for what is no number,
  // and if the file of the token cannot be read.
  Options& from_environment() {
    const auto text = [](const char* key, std::string& to) {
      if (const char* value = std::getenv(key); value && *value) to = value;
    };
    const auto number = [](const char* key, auto& to, std::uint64_t least, std::uint64_t most) {
      if (const char* value = std::getenv(key); value && *value)
        to = static_cast<std::remove_reference_t<decltype(to)>>(whole(key, value, least, most));
    };
    text("CLIPPER_ADDRESS", address);
    text("CLIPPER_TOKEN", token);
    text("CLIPPER_MODEL", name);
    text("CLIPPER_INPUT", input);
    text("CLIPPER_OUTPUT", output);
    text("CLIPPER_WARMUP", warmup);
    number("CLIPPER_VERSION", version, 0, INT64_MAX);
    number("CLIPPER_REPLICA", replica, 0, INT64_MAX);
    number("CLIPPER_BATCH_MAX", batch_max, 0, INT32_MAX);
    number("CLIPPER_RETRY_SINGLY", retry_singly, 0, 1);
    number("CLIPPER_PROTOCOL", protocol, 1, 2);
    number("CLIPPER_ALL_SERVERS", all_servers, 0, 1);
    text("CLIPPER_ALIVE_FILE", alive_file);
    std::string file;
    text("CLIPPER_TOKEN_FILE", file);
    if (token.empty() && !file.empty()) {
      std::ifstream lines(file);
      if (!std::getline(lines, token))
        throw std::invalid_argument("CLIPPER_TOKEN_FILE: cannot read a token from " + file);
      token = stripped(token);
    }
    unsetenv("CLIPPER_TOKEN");
    return *this;
  }

 private:
  static std::uint64_t whole(const char* key, const char* value, std::uint64_t least,
                             std::uint64_t most) {
    char* end = nullptr;
    errno = 0;
    const std::uint64_t number = std::strtoull(value, &end, 10);
    if (!std::isdigit(static_cast<unsigned char>(*value)) || *end || errno || number < least ||
        number > most)
      throw std::invalid_argument(std::string(key) + " is '" + value +
                                  "': expected a number from " + std::to_string(least) + " to " +
                                  std::to_string(most));
    return number;
  }

  static std::string stripped(const std::string& text) {
    const char* spaces = " \t\r\n\f\v";
    const std::size_t from = text.find_first_not_of(spaces);
    if (from == std::string::npos) return {};
    return text.substr(from, text.find_last_not_of(spaces) - from + 1);
  }
};

namespace detail {

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string error_text(const char* what) { return std::string(what) + ": " + strerror(errno); }

// A file descriptor that is closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  // Give the descriptor to the caller.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Decode base64. Throws: BadFrame.
inline std::string from_base64(std::string_view text) {
  std::string bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    const int v = c >= 'A' && c <= 'Z'   ? c - 'A'
                  : c >= 'a' && c <= 'z' ? c - 'a' + 26
                  : c >= '0' && c <= '9' ? c - '0' + 52
                  : c == '+'             ? 62
                  : c == '/'             ? 63
                                         : -1;
    if (v < 0) throw BadFrame("CLIPPER_WARMUP is not base64");
    bits = bits << 6 | static_cast<std::uint32_t>(v);
    if ((count += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8)));
  }
  return bytes;
}

}  // namespace detail

// Requests a stop, from a signal handler or another thread.
class StopSwitch {
 public:
  StopSwitch() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  void request() {
    requested_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof one);
  }
  bool requested() const { return requested_; }
  int fd() const { return event_.get(); }
  // Sleep, but not beyond a stop. Throws: Stopping.
  void wait(double seconds) const {
    pollfd entry{fd(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(seconds * 1000));
    if (requested_) throw Stopping{};
  }

 private:
  std::atomic<bool> requested_{false};
  detail::Descriptor event_;
};

namespace detail {

// Return host and port of tcp:host:port. Throws: std::invalid_argument for another address.
inline std::pair<std::string, std::string> tcp_place(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (address.rfind("tcp:", 0) != 0 || colon <= 4)
    throw std::invalid_argument("cannot connect to '" + address +
                                "': write unix:/path or tcp:host:port");
  std::string host = address.substr(4, colon - 4);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return {host, address.substr(colon + 1)};
}

using Places = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Look up a host. Throws: Disconnected.
inline Places look_up(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found))
    throw Disconnected("cannot resolve " + host + ": " + gai_strerror(error));
  return Places(found, freeaddrinfo);
}

}  // namespace detail

// Connect to unix:/path or tcp:host:port. Throws: Disconnected; std::invalid_argument for another
// address.
inline int connect_to(const std::string& address) {
  const timeval limit{static_cast<time_t>(ATTEMPT_S), 0};
  if (address.rfind("unix:", 0) == 0 && address.size() > 5) {
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    if (address.size() - 5 >= sizeof at.sun_path)
      throw std::invalid_argument("the path of " + address + " is too long for a unix socket");
    std::memcpy(at.sun_path, address.data() + 5, address.size() - 5);
    detail::Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (fd.get() < 0 || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&at), sizeof at))
      throw Disconnected(detail::error_text("cannot connect"));
    return fd.release();
  }
  const auto [host, port] = detail::tcp_place(address);
  const detail::Places all = detail::look_up(host, port);
  for (const addrinfo* one = all.get(); one; one = one->ai_next) {
    detail::Descriptor fd(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) continue;
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (::connect(fd.get(), one->ai_addr, one->ai_addrlen)) continue;
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    return fd.release();
  }
  throw Disconnected(detail::error_text("cannot connect"));
}

// A connection to the server. Threads: one reads; any may send.
class Connection {
 public:
  Connection(int fd, const StopSwitch& stop) : fd_(fd), stop_(stop) {
    cpu_set_t cores;
    spins_ = sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > 1;
    set_silence(ATTEMPT_S);
    buffer_.reserve(READ_BYTES + HEADER_BYTES, 0);
  }

  // Set how long the server may be silent, in seconds; 0 for no limit.
  void set_silence(double seconds) {
    silence_s_ = seconds;
    const timeval limit{static_cast<time_t>(seconds),
                        static_cast<suseconds_t>((seconds - static_cast<long>(seconds)) * 1e6)};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }

  // Accept descriptors along with frames from now on.
  void take_descriptors() { with_descriptors_ = true; }

  // The next received descriptor; -1 if there is none.
  detail::Descriptor descriptor() {
    if (descriptors_.empty()) return detail::Descriptor();
    detail::Descriptor first = std::move(descriptors_.front());
    descriptors_.pop_front();
    return first;
  }

  // True if bytes wait or a stop is requested.
  bool is_readable() const {
    pollfd entries[2] = {{fd_.get(), POLLIN, 0}, {stop_.fd(), POLLIN, 0}};
    return filled_ > used_ || ::poll(entries, 2, 0) > 0;
  }

  // Wait for a message and place its first byte at `offset` from an aligned address; the bytes of
  // the last message are lost. Throws: Stopping before the message begins; Disconnected.
  void next_message(std::size_t offset = 0) {
    const std::size_t rest = filled_ - used_;
    buffer_.reserve(offset + rest + READ_BYTES, filled_);
    if (rest) std::memmove(buffer_.data() + offset, buffer_.data() + used_, rest);
    used_ = offset;
    filled_ = offset + rest;
    if (stop_.requested()) throw Stopping{};
    if (rest || spin()) return;
    wait();
    receive(offset + READ_BYTES, 0);
  }

  // Return the next `n` bytes of the message; valid until take() or next_message(). Memory grows as
  // bytes arrive. Throws: Disconnected.
  const std::uint8_t* take(std::size_t n) {
    const std::size_t end = used_ + n;
    while (filled_ < end) {
      const std::size_t room = std::min(end, std::max(2 * filled_, READ_BYTES + HEADER_BYTES));
      buffer_.reserve(room, filled_);
      receive(std::min(end, buffer_.size()), 0);
    }
    const std::uint8_t* taken = buffer_.data() + used_;
    used_ = end;
    return taken;
  }

  // Send bytes as one message. Throws: Disconnected.
  void send(const void* bytes, std::size_t size) {
    const std::lock_guard<std::mutex> guard(sending_);
    const auto* at = static_cast<const std::uint8_t*>(bytes);
    while (size) {
      const ssize_t sent = ::send(fd_.get(), at, size, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) {
        const std::string why = detail::error_text("connection lost");
        shutdown();  // part of a frame may be sent; nothing can follow it
        throw Disconnected(why);
      }
      at += sent;
      size -= static_cast<std::size_t>(sent);
    }
    last_sent_s_ = detail::now_s();
  }
  void send(std::string_view frame) { send(frame.data(), frame.size()); }

  double last_sent_s() const { return last_sent_s_; }
  void shutdown() { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  void wait() {
    for (;;) {
      pollfd entries[2] = {{fd_.get(), POLLIN, 0}, {stop_.fd(), POLLIN, 0}};
      const int ready = ::poll(entries, 2, silence_s_ > 0 ? static_cast<int>(silence_s_ * 1000) : -1);
      if (stop_.requested()) throw Stopping{};
      if (ready == 0) throw Disconnected("the server has been silent for too long");
      if (ready > 0 && entries[0].revents) return;
    }
  }

  // Poll for SPIN_NS instead of sleeping, because a wake-up costs more than most models. Only with
  // a second core and while it pays.
  bool spin() {
    if (!spins_ || (spin_score_ < 0 && ++spin_count_ % SPIN_TRIAL)) return false;
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(SPIN_NS);
    do {
      if (receive(used_ + READ_BYTES, MSG_DONTWAIT)) {
        spin_score_ = std::min(spin_score_ + 1, SPIN_SCORE_MAX);
        return true;
      }
    } while (!stop_.requested() && std::chrono::steady_clock::now() < until);
    spin_score_ = std::max(spin_score_ - 1, -1);
    return false;
  }

  // Receive bytes up to `end` of the buffer. Returns false if none are there (MSG_DONTWAIT).
  bool receive(std::size_t end, int flags) {
    for (;;) {
      iovec room{buffer_.data() + filled_, end - filled_};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * DESCRIPTORS_MAX)];
      msghdr message{};
      message.msg_iov = &room;
      message.msg_iovlen = 1;
      if (with_descriptors_) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
      }
      const ssize_t count = recvmsg(fd_.get(), &message, flags | MSG_CMSG_CLOEXEC);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        if (flags) return false;
        throw Disconnected("the server stopped sending within a frame");
      }
      if (count < 0) throw Disconnected(detail::error_text("connection lost"));
      if (with_descriptors_) collect(message);
      if (count == 0) throw Disconnected("the server closed the connection");
      filled_ += static_cast<std::size_t>(count);
      return true;
    }
  }

  void collect(msghdr& message) {
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; i++) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
        descriptors_.emplace_back(fd);
      }
    }
    if (message.msg_flags & MSG_CTRUNC || descriptors_.size() > DESCRIPTORS_MAX)
      throw BadFrame("more descriptors than frames that need one");
  }

  detail::Descriptor fd_;
  const StopSwitch& stop_;
  AlignedBytes buffer_;
  std::size_t filled_ = 0, used_ = 0;
  std::deque<detail::Descriptor> descriptors_;
  bool with_descriptors_ = false, spins_ = false;
  int spin_score_ = 0, spin_count_ = 0;
  double silence_s_ = 0;
  std::mutex sending_;
  std::atomic<double> last_sent_s_{detail::now_s()};
};

// -- rows in shared memory

// The regions of one connection: memory that the server shares, mapped read-only.
class Regions {
 public:
  explicit Regions(std::uint64_t payload_bytes_max) : payload_bytes_max_(payload_bytes_max) {}

  // Map a region. Throws: BadFrame; CannotShare if it cannot be mapped.
  void add(const RegionInfo& info, const detail::Descriptor& fd) {
    if (fd.get() < 0) throw CannotShare("a region came without its descriptor");
    const std::string name = "region " + std::to_string(info.number);
    if (regions_.count(info.number) || regions_.size() == REGIONS_MAX)
      throw BadFrame(name + " exists already, or there are more than " + std::to_string(REGIONS_MAX));
    std::uint64_t size = 0;
    struct stat file {};
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) throw BadFrame(name + " could shrink");
    if (fstat(fd.get(), &file) || __builtin_mul_overflow(info.rows, info.row_bytes, &size) ||
        size > static_cast<std::uint64_t>(file.st_size))
      throw BadFrame(name + " is smaller than announced");
    void* at = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) throw CannotShare(detail::error_text("a region cannot be mapped"));
    regions_.emplace(info.number, Region(static_cast<const std::uint8_t*>(at), size, info));
  }

  // Return the rows of a SHARED batch: pointers into the region if they are consecutive, else a
  // copy. Throws: BadFrame, FrameTooLarge.
  void open(const Header& header, const std::uint8_t* payload, Rows& rows) {
    open_runs(header, payload, runs_);
    const std::uint64_t total = detail::bytes_of(header);
    if (total > payload_bytes_max_)
      throw FrameTooLarge("rows of " + std::to_string(total) + " bytes; the limit is " +
                          std::to_string(payload_bytes_max_));
    const std::uint64_t row_bytes = total / header.rows;
    rows.describe(header);
    rows.data_bytes = total;
    if (runs_.size() == 1) {
      rows.data = checked(runs_[0], row_bytes);
    } else {
      copy_.reserve(total, 0);
      std::uint8_t* to = copy_.data();
      for (const Run& run : runs_) {
        std::memcpy(to, checked(run, row_bytes), run.rows * row_bytes);
        to += run.rows * row_bytes;
      }
      rows.data = copy_.data();
    }
    detail::check_bools(rows);
  }

 private:
  // One mapping.
  class Region {
   public:
    Region(const std::uint8_t* bytes, std::size_t size, const RegionInfo& info)
        : bytes_(bytes), size_(size), info_(info) {}
    Region(Region&& other) noexcept
        : bytes_(std::exchange(other.bytes_, nullptr)), size_(other.size_), info_(other.info_) {}
    ~Region() {
      if (bytes_) munmap(const_cast<std::uint8_t*>(bytes_), size_);
    }
    const std::uint8_t* bytes_;
    std::size_t size_;
    RegionInfo info_;
  };

  const std::uint8_t* checked(const Run& run, std::uint64_t row_bytes) const {
    const auto found = regions_.find(run.region);
    if (found == regions_.end()) throw BadFrame("region " + std::to_string(run.region) + " is unknown");
    const RegionInfo& info = found->second.info_;
    if (row_bytes != info.row_bytes)
      throw BadFrame("rows of " + std::to_string(row_bytes) + " bytes in a region of rows of " +
                     std::to_string(info.row_bytes));
    if (run.first > info.rows || run.rows > info.rows - run.first)
      throw BadFrame("rows from " + std::to_string(run.first) + " of a region of " +
                     std::to_string(info.rows));
    return found->second.bytes_ + run.first * row_bytes;
  }

  std::uint64_t payload_bytes_max_;
  std::map<std::uint64_t, Region> regions_;
  std::vector<Run> runs_;
  AlignedBytes copy_;
};

// -- warm-up

// The result of a warm-up: (rows, microseconds) of each batch, the type of one output, and why it
// failed.
struct WarmUp {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> timings;
  std::string output;
  std::string error;
};

constexpr std::size_t WARMUP_ERROR_BYTES_MAX = 1000;

namespace detail {

// A type of rows such as f64[2,3]. items: elements of one row; -1 if its length is free.
struct RowType {
  DType dtype = DType::ANY;
  std::vector<std::uint32_t> shape;
  bool variable = false;
};

// Parse a type. Throws: std::invalid_argument.
inline RowType parse_type(const std::string& text) {
  RowType type;
  const std::size_t bracket = text.find('[');
  const std::string name = text.substr(0, bracket);
  for (int i = 0; i <= DTYPE_MAX; i++)
    if (name == name_of(static_cast<DType>(i))) type.dtype = static_cast<DType>(i);
  if (name != "any" && type.dtype == DType::ANY) throw std::invalid_argument("'" + text + "' is not a type");
  type.variable = type.dtype >= DType::STR;
  if (bracket == std::string::npos) return type;
  std::size_t at = bracket + 1;
  while (at < text.size() && text[at] != ']') {
    if (text[at] == '*') {
      type.variable = true;
      break;
    }
    std::size_t used = 0;
    type.shape.push_back(static_cast<std::uint32_t>(std::stoul(text.substr(at), &used)));
    at += used + (text[at + used] == ',');
    if (type.shape.size() > RANK_MAX) throw std::invalid_argument("'" + text + "' is not a type");
  }
  return type;
}

// Generate one row: numbers from 0 to 1 for floats, zeros for the rest, a short text. Empty for
// `any` and for very large rows.
inline std::string make_row(const RowType& type, std::uint64_t& items) {
  if (type.dtype == DType::ANY) return {};
  if (type.dtype >= DType::STR) {
    items = 7;
    return "warm up";
  }
  items = type.variable ? 8 : 1;
  if (!type.variable)
    for (const auto dim : type.shape)
      if (__builtin_mul_overflow(items, static_cast<std::uint64_t>(dim), &items)) return {};
  if (items > WARMUP_ITEMS_MAX) return {};
  std::string row(items * item_bytes(type.dtype), '\0');
  auto* to = reinterpret_cast<std::uint8_t*>(row.data());
  for (std::uint64_t i = 0; i < items; i++) {
    const double value = items > 1 ? static_cast<double>(i) / static_cast<double>(items - 1) : 0.0;
    if (type.dtype == DType::F64) store(to + 8 * i, value);
    if (type.dtype == DType::F32) store(to + 4 * i, static_cast<float>(value));
  }
  return row;
}

}  // namespace detail

// Runs growing batches before the container connects, and times them. A model that fails here is
// ready all the same; the reason is printed to stderr.
class WarmUpRun {
 public:
  WarmUpRun(Model& model, const Options& options) : model_(model), options_(options) {}

  WarmUp run() {
    if (options_.warmup == "off") return {};
    try {
      if (options_.warmup.empty()) generate();
      else given();
      if (given_.n) measure();
    } catch (...) {
      const std::string why =
          "it failed in its warm-up, and serves without: " + detail::text_of_error();
      std::fprintf(stderr, "model '%s': %s\n", options_.name.c_str(), why.c_str());
      WarmUp failed;
      failed.error = why.substr(0, WARMUP_ERROR_BYTES_MAX);
      for (char& byte : failed.error)
        if (static_cast<unsigned char>(byte) > 0x7f) byte = '?';  // it may be no UTF-8, or cut
      return failed;
    }
    return found_;
  }

 private:
  void generate_record() {
    const Schema schema = Schema::parse(options_.input);
    row_ = make_record(schema);
    given_.dtype = schema.is_fixed() ? DType::U8 : DType::BYTES;
    given_.n = given_.rank = 1;
    given_.variable = !schema.is_fixed();
    if (given_.variable) given_.offsets = {0, row_.size()};
    else given_.dims[0] = static_cast<std::uint32_t>(row_.size());
    given_.data = reinterpret_cast<const std::uint8_t*>(row_.data());
    given_.data_bytes = row_.size();
  }

  void generate() {
    if (options_.input[0] == '{') {
      generate_record();
      return;
    }
    const detail::RowType type = detail::parse_type(options_.input);
    std::uint64_t items = 0;
    row_ = detail::make_row(type, items);
    if (row_.empty()) return;
    given_.dtype = type.dtype;
    given_.n = 1;
    given_.variable = type.variable;
    given_.rank = static_cast<std::uint8_t>(type.variable ? 1 : type.shape.size());
    if (!type.variable) std::copy(type.shape.begin(), type.shape.end(), given_.dims.begin());
    if (type.variable) given_.offsets = {0, items};
    given_.data = reinterpret_cast<const std::uint8_t*>(row_.data());
    given_.data_bytes = row_.size();
  }

  void given() {
    const std::string raw = detail::from_base64(options_.warmup);
    frame_ = AlignedBytes(reinterpret_cast<const std::uint8_t*>(raw.data()), raw.size());
    if (raw.size() < HEADER_BYTES) throw BadFrame("CLIPPER_WARMUP is no frame");
    const Header header = decode_header(frame_.data());
    if (header.kind != Kind::PREDICT || header.payload_bytes != raw.size() - HEADER_BYTES)
      throw BadFrame("CLIPPER_WARMUP is no PREDICT frame");
    open_rows(header, frame_.data() + HEADER_BYTES, given_);
  }

  std::uint64_t run_one(std::uint32_t n) {
    Rows rows;
    rows.dtype = given_.dtype;
    rows.n = n;
    rows.rank = given_.rank;
    rows.dims = given_.dims;
    rows.variable = given_.variable;
    std::string bytes;
    const std::uint64_t item = item_bytes(given_.dtype), fixed = given_.data_bytes / given_.n;
    for (std::uint32_t i = 0; i < n; i++) {
      const std::uint32_t from = i % given_.n;
      const std::uint64_t start = given_.variable ? given_.offsets[from] * item : from * fixed;
      const std::uint64_t end = given_.variable ? given_.offsets[from + 1] * item : start + fixed;
      if (given_.variable) rows.offsets.push_back(bytes.size() / item);
      bytes.append(reinterpret_cast<const char*>(given_.data) + start, end - start);
    }
    if (given_.variable) rows.offsets.push_back(bytes.size() / item);
    const AlignedBytes aligned(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    rows.data = aligned.data();
    rows.data_bytes = bytes.size();
    const double started_s = detail::now_s();
    evaluate(model_, rows, options_.retry_singly, outputs_);
    outputs_.encode(0, 0, false, true, PAYLOAD_BYTES_MAX, scratch_);
    return static_cast<std::uint64_t>((detail::now_s() - started_s) * 1e6);
  }

  void measure() {
    run_one(1);
    const double ends_s = detail::now_s() + WARMUP_S;
    const std::uint32_t most = options_.batch_max ? std::min(options_.batch_max, WARMUP_ROWS_MAX)
                                                  : WARMUP_ROWS_MAX;
    const std::uint64_t items = given_.data_bytes / given_.n / item_bytes(given_.dtype);
    for (std::uint32_t n = 1, times = 3;
         n <= most && n * items <= WARMUP_ITEMS_MAX &&
         found_.timings.size() + times <= WARMUP_TIMINGS_MAX;
         n *= 2, times = 2) {
      std::uint64_t took_us = 0;
      for (std::uint32_t i = 0; i < times; i++) {
        took_us = run_one(n);
        found_.timings.emplace_back(n, took_us);
        found_.output = options_.output[0] == '{' ? options_.output : outputs_.type();
        if (detail::now_s() > ends_s) return;
      }
      if (static_cast<double>(took_us) > WARMUP_BATCH_S * 1e6) return;
    }
  }

  Model& model_;
  const Options& options_;
  Rows given_;
  std::string row_;
  AlignedBytes frame_;
  Outputs outputs_;
  std::vector<std::uint8_t> scratch_;
  WarmUp found_;
};

// -- serving

// The fields of WELCOME.
struct Welcome {
  double heartbeat_s = 0.5;
  std::uint64_t payload_bytes_max = PAYLOAD_BYTES_MAX;
  bool crc = false, shared = false, accuracy = false, qualifiers = false, quiet = false,
       partial = false;

  // Check and convert the fields. Throws: BadFrame.
  static Welcome read(const Map& fields) {
    Welcome welcome;
    for (const auto& [key, value] : fields) {
      if (key == "heartbeat_ms" || key == "payload_bytes_max") {
        const std::int64_t most =
            key == "heartbeat_ms" ? HEARTBEAT_MS_MAX : (std::int64_t{1} << 40) - 1;
        if (value.type != MapValue::INT || value.number <= 0 || value.number > most)
          throw BadFrame("WELCOME's " + key + " is not a number from 1 to " + std::to_string(most));
        if (key == "heartbeat_ms") welcome.heartbeat_s = static_cast<double>(value.number) / 1000;
        else welcome.payload_bytes_max = static_cast<std::uint64_t>(value.number);
      }
      if (value.type != MapValue::BOOL) continue;
      const bool on = value.number;
      if (key == "crc") welcome.crc = on;
      if (key == "shared") welcome.shared = on;
      if (key == "accuracy") welcome.accuracy = on;
      if (key == "qualifiers") welcome.qualifiers = on;
      if (key == "quiet") welcome.quiet = on;
      if (key == "partial") welcome.partial = on;
    }
    return welcome;
  }
};

// Encode HELLO. sharing: this connection can receive descriptors.
inline std::string hello_frame(const Options& options, const WarmUp& warm, bool sharing) {
  const bool tcp = options.address.rfind("tcp:", 0) == 0, two = options.protocol == 2;
  const bool usual = !options.corrects && two && options.alive_file.empty();
  const bool timed = !warm.output.empty();
  const bool quiet = usual && !tcp, sparse = usual && tcp, crc = tcp && two;
  const bool failed = !warm.error.empty();
  MapWriter map(13u + quiet + sparse + crc + 2u * timed + failed);
  if (quiet) map.boolean("quiet", true);
  if (sparse) map.boolean("sparse", true);
  if (crc) map.boolean("crc", true);
  if (timed) {
    map.pairs("timings", warm.timings);
    map.text("gives", warm.output);
  }
  if (failed) map.text("warm_error", warm.error);
  map.text("name", options.name);
  map.number("version", options.version);
  map.number("replica", options.replica);
  map.text("input", options.input);
  map.text("output", options.output);
  map.number("batch_max", options.batch_max);
  map.number("protocol", static_cast<std::uint64_t>(options.protocol));
  map.text("token", options.token);
  map.number("pid", static_cast<std::uint64_t>(getpid()));
  map.text("sdk", SDK);
  map.boolean("shared", sharing && two);
  map.boolean("corrects", options.corrects && two);
  map.boolean("sessions", options.sessions && two);
  return control_frame(Kind::HELLO, map.bytes());
}

// Read the first frame of a server. Throws: ContainerRejected, BadFrame, Disconnected.
inline Welcome read_welcome(Connection& connection) {
  connection.next_message();
  const Header header = decode_header(connection.take(HEADER_BYTES), CONTROL_BYTES_MAX);
  const std::uint8_t* payload = connection.take(header.payload_bytes);
  check_payload(header, payload);
  const std::string_view text(reinterpret_cast<const char*>(payload), header.payload_bytes);
  if (header.kind == Kind::REFUSE) throw ContainerRejected(std::string(text));
  if (header.kind != Kind::WELCOME)
    throw BadFrame(std::string("expected WELCOME or REFUSE, got ") + name_of(header.kind));
  return Welcome::read(unpack_map(text));
}

namespace detail {

// Set the modification time of a file to now, and create it if it is missing; "" is no file.
inline void touch(const std::string& path) {
  if (path.empty()) return;
  const Descriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  if (fd.get() >= 0) futimens(fd.get(), nullptr);
}

// Sends HEARTBEAT when nothing was sent for an interval, and ACCURACY as often, in a thread, which
// touches the alive file too.
class Heart {
 public:
  Heart(Connection& connection, const Welcome& welcome, const std::string& alive_file)
      : connection_(connection), welcome_(welcome), alive_file_(alive_file) {
    thread_ = std::thread([this] { beat(); });
  }
  ~Heart() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    connection_.shutdown();
    thread_.join();
  }
  // Send this with the next heartbeat.
  void report(const Accuracy& news) {
    const std::lock_guard<std::mutex> guard(mutex_);
    news_ = news;
  }

 private:
  void beat() {
    std::unique_lock<std::mutex> guard(mutex_);
    try {
      for (;;) {
        const double pause_s = connection_.last_sent_s() + welcome_.heartbeat_s - now_s();
        const auto pause = std::chrono::duration<double>(std::max(pause_s, 0.001));
        if (changed_.wait_for(guard, pause, [&] { return done_; })) return;
        const Accuracy news = news_;
        guard.unlock();
        touch(alive_file_);
        if (welcome_.accuracy && !(news == sent_)) {
          connection_.send(control_frame(Kind::ACCURACY, pack_accuracy(news)));
          sent_ = news;
        }
        if (now_s() - connection_.last_sent_s() >= welcome_.heartbeat_s)
          connection_.send(control_frame(Kind::HEARTBEAT));
        guard.lock();
      }
    } catch (const Disconnected&) {
      return;
    }
  }

  Connection& connection_;
  const Welcome& welcome_;
  const std::string& alive_file_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Accuracy news_, sent_;
  std::thread thread_;
};

// A lock that threads get in the order in which they asked for it, so that a server that always has
// a batch does not keep others waiting; a std::mutex goes to whoever is awake.
class Turns {
 public:
  void lock() {
    std::unique_lock<std::mutex> guard(mutex_);
    const std::uint64_t mine = next_++;
    changed_.wait(guard, [&] { return mine == now_; });
  }
  void unlock() {
    const std::lock_guard<std::mutex> guard(mutex_);
    now_++;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ = 0, now_ = 0;
};

}  // namespace detail

// What the connections to several servers share. turn: held while the model runs. is_wanted:
// whether to connect again after the connection to this address was lost.
struct Together {
  const WarmUp& warm;
  detail::Turns& turn;
  std::function<bool(const std::string&)> is_wanted;
};

// Serves a model over connections to one server. together: null if there is no other server.
class Container {
 public:
  Container(Model& model, Options options, const StopSwitch& stop,
            const Together* together = nullptr)
      : model_(model), options_(std::move(options)), stop_(stop), together_(together) {
    sharing_ = options_.sharing && options_.protocol == 2 && options_.address.rfind("unix:", 0) == 0;
  }

  // Warm up, then answer batches until the server says GOODBYE or a stop is requested. The model
  // must be loaded. Throws: ContainerRejected; std::invalid_argument for an invalid address.
  void serve() {
    warm_ = together_ ? together_->warm : WarmUpRun(model_, options_).run();
    std::minstd_rand random(std::random_device{}());
    std::uniform_real_distribution<double> share(0.5, 1.0);
    backoff_s_ = BACKOFF_S_MIN;
    try {
      for (;;) {
        try {
          serve_once();
          return;
        } catch (const CannotShare& error) {
          sharing_ = false;
          log_once(error.what());
        } catch (const Disconnected& error) {
          log_once(error.what());
        } catch (const BadFrame& error) {
          log_once(error.what());
        } catch (const std::bad_alloc&) {
          log_once("no memory for a frame");
        } catch (const std::system_error& error) {
          log_once((std::string("no thread for heartbeats: ") + error.what()).c_str());
        }
        if (together_ && !together_->is_wanted(options_.address)) return;
        stop_.wait(backoff_s_ * share(random));
        backoff_s_ = std::min(BACKOFF_S_MAX, backoff_s_ * 2);
      }
    } catch (const Stopping&) {
    }
  }

 private:
  void log_once(const char* why) {
    if (why == last_error_) return;
    last_error_ = why;
    std::fprintf(stderr, "model '%s': %s: %s; reconnecting\n", options_.name.c_str(),
                 options_.address.c_str(), why);
  }

  void serve_once() {
    Connection connection(connect_to(options_.address), stop_);
    if (sharing_) connection.take_descriptors();  // one may follow WELCOME immediately
    connection.send(hello_frame(options_, warm_, sharing_));
    const Welcome welcome = read_welcome(connection);
    backoff_s_ = BACKOFF_S_MIN;
    last_error_.clear();
    detail::touch(options_.alive_file);
    if (options_.protocol == 1) {
      connection.set_silence(0);  // version 1 has no heartbeats
      for (;;) answer_v1(connection, welcome);
    }
    connection.set_silence(welcome.quiet ? 0 : SILENCE_HEARTBEATS * welcome.heartbeat_s);
    Regions regions(welcome.payload_bytes_max);
    std::unique_ptr<detail::Heart> heart;
    if (!welcome.quiet) heart =
          std::make_unique<detail::Heart>(connection, welcome, options_.alive_file);
    feedback_.clear();
    feedback_bytes_ = 0;
    progress_ = Accuracy();
    try {
      while (answer(connection, welcome, regions, heart.get())) {
      }
    } catch (const Stopping&) {
      send_goodbye(connection);
      throw;
    }
    send_goodbye(connection);
  }

  static void send_goodbye(Connection& connection) {
    try {
      connection.send(control_frame(Kind::GOODBYE));
    } catch (const Disconnected&) {
    }
  }

  // Read one frame and answer it. Returns false after GOODBYE.
  bool answer(Connection& connection, const Welcome& welcome, Regions& regions,
              detail::Heart* heart) {
    while (!feedback_.empty() && !connection.is_readable()) learn(heart);
    connection.next_message();
    const Header header = decode_header(connection.take(HEADER_BYTES), welcome.payload_bytes_max);
    const std::uint8_t* payload = connection.take(header.payload_bytes);
    if (header.kind == Kind::PREDICT) {
      if (sharing_ && welcome.shared && header.flags & SHARED) regions.open(header, payload, rows_);
      else open_rows(header, payload, rows_, welcome.payload_bytes_max);
      reply(connection, welcome, header.id);
    } else if (header.kind == Kind::REGION && sharing_ && welcome.shared) {
      regions.add(open_region(header, payload), connection.descriptor());
    } else if (header.kind == Kind::FEEDBACK && options_.corrects) {
      queue_feedback(open_feedback(header, payload, welcome.payload_bytes_max), welcome);
    } else if (header.kind == Kind::GOODBYE) {
      return false;
    } else if (header.kind != Kind::HEARTBEAT) {
      throw BadFrame(std::string("unexpected ") + name_of(header.kind));
    }
    return true;
  }

  // Queue feedback. Beyond FEEDBACK_FRAMES_MAX, or the bytes of one payload, the oldest is dropped.
  void queue_feedback(Feedback feedback, const Welcome& welcome) {
    feedback_bytes_ += feedback.bytes();
    feedback_.push_back(std::move(feedback));
    while (feedback_.size() > FEEDBACK_FRAMES_MAX ||
           (feedback_.size() > 1 && feedback_bytes_ > welcome.payload_bytes_max)) {
      progress_.failed += next_feedback().inputs.n;
      complain("feedback arrives faster than correct() processes it; the oldest is dropped");
    }
  }

  Feedback next_feedback() {
    Feedback next = std::move(feedback_.front());
    feedback_.pop_front();
    feedback_bytes_ -= next.bytes();
    return next;
  }

  // Wait until no other connection uses the model.
  std::unique_lock<detail::Turns> my_turn() const {
    if (!together_) return {};
    return std::unique_lock<detail::Turns>(together_->turn);
  }

  // Run the model. Returns the microseconds that it took, without the wait for its turn.
  std::uint64_t predict() {
    const auto turn = my_turn();
    const double started_s = detail::now_s();
    evaluate(model_, rows_, options_.retry_singly, outputs_);
    return static_cast<std::uint64_t>((detail::now_s() - started_s) * 1e6);
  }

  void reply(Connection& connection, const Welcome& welcome, std::uint64_t id) {
    std::string why;
    try {
      const std::uint64_t took_us = predict();
      outputs_.encode(id, took_us, welcome.crc, welcome.qualifiers, welcome.payload_bytes_max,
                      reply_, welcome.partial);
      connection.send(reply_.data(), reply_.size());
      return;
    } catch (const Disconnected&) {
      throw;
    } catch (...) {
      why = detail::text_of_error();
    }
    why = complain(why);
    connection.send(control_frame(Kind::FAILURE, why, id, welcome.crc));
  }

  // Print what went wrong, the same at most each COMPLAIN_S. Returns it with the model's name.
  std::string complain(const std::string& what) {
    const std::string why = "model '" + options_.name + "': " + what.substr(0, 16 << 10);
    if (why != complaint_ || detail::now_s() > complaint_s_ + COMPLAIN_S) {
      std::fprintf(stderr, "%s\n", why.c_str());
      complaint_ = why;
      complaint_s_ = detail::now_s();
    }
    return why;
  }

  void answer_v1(Connection& connection, const Welcome& welcome) {
    connection.next_message(HEADER_BYTES - V1_HEAD_BYTES);  // the content is aligned
    std::uint8_t head[V1_HEAD_BYTES];
    std::memcpy(head, connection.take(V1_HEAD_BYTES), V1_HEAD_BYTES);
    const std::uint64_t size = v1_content_bytes(head, welcome.payload_bytes_max);
    open_v1(head, connection.take(size), size, rows_, welcome.payload_bytes_max);
    std::vector<double> numbers;
    try {
      predict();
      numbers = outputs_.numbers();
    } catch (...) {
      throw Disconnected("the model failed, which version 1 cannot report: " +
                         detail::text_of_error());
    }
    connection.send(numbers.data(), numbers.size() * sizeof(double));
  }

  void learn(detail::Heart* heart) {
    const Feedback feedback = next_feedback();
    const auto turn = my_turn();
    try {
      model_.correct(Batch(feedback.inputs), Batch(feedback.labels));
      progress_.learned += feedback.inputs.n;
    } catch (...) {
      progress_.failed += feedback.inputs.n;
      complain("correct() failed: " + detail::text_of_error());
    }
    if (!feedback_.empty()) return;
    try {
      const double accuracy = model_.accuracy();
      progress_.accuracy = accuracy >= 0.0 && accuracy <= 1.0 ? accuracy : -1.0;
    } catch (...) {
      complain("accuracy() failed: " + detail::text_of_error());
    }
    if (heart) heart->report(progress_);
  }

  Model& model_;
  Options options_;
  const StopSwitch& stop_;
  const Together* together_;
  bool sharing_;
  WarmUp warm_;
  double backoff_s_ = BACKOFF_S_MIN;
  std::string last_error_;
  Rows rows_;
  Outputs outputs_;
  std::vector<std::uint8_t> reply_;
  std::deque<Feedback> feedback_;
  std::uint64_t feedback_bytes_ = 0;
  Accuracy progress_;
  std::string complaint_;
  double complaint_s_ = 0;
};

// Serves a model to several servers at once: to all that are listed, or that a host stands for.
//
// Each server has a connection and a thread; the model evaluates one batch at a time, in
// the order in which they came. Names are looked up every LOOK_UP_S, so servers that come are
// connected to, and those that are gone from the name are left once their connection is lost. A
// server that says GOODBYE or rejects the container is tried again later, for as long as its
// address is listed.
class AllServers {
 public:
  // Throws: std::invalid_argument for an invalid address.
  AllServers(Model& model, Options options, StopSwitch& stop)
      : model_(model), options_(std::move(options)), stop_(stop) {
    std::size_t from = 0;
    for (std::size_t to = 0; to != std::string::npos; from = to + 1) {
      to = options_.address.find(',', from);
      addresses_.push_back(options_.address.substr(from, to - from));
      if (addresses_.back().rfind("unix:/", 0) != 0) detail::tcp_place(addresses_.back());
    }
  }

  // Warm up, then answer batches until a stop is requested. Throws: ContainerRejected when all
  // servers reject this container; what ended a connection unexpectedly.
  void serve() {
    warm_ = WarmUpRun(model_, options_).run();
    try {
      for (;;) {
        look_up();
        check();
        stop_.wait(LOOK_UP_S);
      }
    } catch (const Stopping&) {
      join_all();
    } catch (...) {
      stop_.request();
      join_all();
      throw;
    }
  }

 private:
  // The connection to one server. is_over: its thread has ended, by `error` if there is one.
  struct Server {
    std::thread thread;
    std::atomic<bool> is_over{false};
    std::string rejected;
    std::exception_ptr error;
    double started_s = 0, due_s = 0, backoff_s = BACKOFF_S_MIN;
  };

  // Read what the addresses stand for now. What cannot be resolved is missing, and printed once;
  // without any the last ones stay.
  void look_up() {
    std::vector<std::string> found;
    std::string why;
    for (const std::string& address : addresses_) {
      if (address.rfind("unix:", 0) == 0) {
        found.push_back(address);
        continue;
      }
      const auto [host, port] = detail::tcp_place(address);
      try {
        const detail::Places all = detail::look_up(host, port);
        for (const addrinfo* one = all.get(); one; one = one->ai_next) {
          char ip[INET6_ADDRSTRLEN + 16];  // with its zone
          if (one->ai_family != all->ai_family ||  // a host of two families is one server
              getnameinfo(one->ai_addr, one->ai_addrlen, ip, sizeof ip, nullptr, 0, NI_NUMERICHOST))
            continue;
          const std::string text = one->ai_family == AF_INET6 ? "[" + std::string(ip) + "]" : ip;
          const std::string place = "tcp:" + text + ":" + port;
          if (std::find(found.begin(), found.end(), place) == found.end()) found.push_back(place);
        }
      } catch (const Disconnected& error) {
        why = error.what();
      }
    }
    if (!why.empty() && why != unresolved_)
      std::fprintf(stderr, "model '%s': %s; trying again\n", name(), why.c_str());
    unresolved_ = why;
    if (found.empty()) return;
    if (found.size() > SERVERS_MAX) found.resize(SERVERS_MAX);
    const std::lock_guard<std::mutex> guard(mutex_);
    listed_ = std::move(found);
  }

  bool is_listed(const std::string& address) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::find(listed_.begin(), listed_.end(), address) != listed_.end();
  }

  // Collect connections that are over, and start those that are due.
  void check() {
    std::string rejections;
    std::size_t rejected = 0;
    for (auto at = servers_.begin(); at != servers_.end();) {
      Server& one = at->second;
      const bool ended = one.thread.joinable() && one.is_over;
      if (ended) {
        one.thread.join();
        if (one.error) std::rethrow_exception(one.error);
        if (detail::now_s() - one.started_s > BACKOFF_S_MAX) one.backoff_s = BACKOFF_S_MIN;
        pause(one);
      }
      if (!one.thread.joinable() && !one.rejected.empty() && is_listed(at->first)) {
        rejected++;
        const std::string why = at->first + ": " + one.rejected;
        if (ended) std::fprintf(stderr, "model '%s': rejected by %s\n", name(), why.c_str());
        rejections += (rejections.empty() ? "" : "; ") + why;
      }
      at = !one.thread.joinable() && !is_listed(at->first) ? servers_.erase(at) : std::next(at);
    }
    if (rejected && rejected == listed_.size()) throw ContainerRejected(rejections);
    for (const std::string& address : listed_) {
      Server& one = servers_[address];
      if (!one.thread.joinable() && detail::now_s() >= one.due_s) start(address, one);
    }
  }

  void start(const std::string& address, Server& one) {
    one.started_s = detail::now_s();
    one.is_over = false;
    one.rejected.clear();
    Options options = options_;
    options.address = address;
    const auto serve = [this, &one, options] {
      try {
        Container(model_, options, stop_, &together_).serve();
      } catch (const ContainerRejected& error) {
        one.rejected = error.what();
      } catch (...) {
        one.error = std::current_exception();
      }
      one.is_over = true;
    };
    try {
      one.thread = std::thread(serve);
    } catch (const std::system_error& error) {
      std::fprintf(stderr, "model '%s': no thread for %s: %s; trying again\n", name(),
                   address.c_str(), error.what());
      pause(one);
    }
  }

  static void pause(Server& one) {
    one.due_s = detail::now_s() + one.backoff_s;
    one.backoff_s = std::min(BACKOFF_S_MAX, 2 * one.backoff_s);
  }

  const char* name() const { return options_.name.c_str(); }

  void join_all() {
    for (auto& [address, one] : servers_)
      if (one.thread.joinable()) one.thread.join();
  }

  Model& model_;
  Options options_;
  StopSwitch& stop_;
  WarmUp warm_;
  detail::Turns turn_;
  std::mutex mutex_;
  std::vector<std::string> addresses_, listed_;
  std::string unresolved_;  // what was printed of the last look-up
  std::map<std::string, Server> servers_;
  Together together_{warm_, turn_, [this](const std::string& one) { return is_listed(one); }};
};

namespace detail {

inline StopSwitch& process_stop() {
  static StopSwitch stop;
  return stop;
}

}  // namespace detail

// Load a model and serve it until SIGTERM or the server's GOODBYE; return the exit code: 0 stopped
// on request, 2 wrong usage, 3 the model did not load, 4 the server rejected it.
//
// options: those that the environment names are overwritten.
inline int run(Model& model, Options options) {
  try {
    options.from_environment();
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_USAGE;
  }
  if (options.name.empty() || options.address.empty()) {
    std::fprintf(stderr,
                 "CLIPPER_MODEL and CLIPPER_ADDRESS are not set. Start this program by: clipper"
                 " deploy NAME --command PROGRAM\n");
    return EXIT_USAGE;
  }
  StopSwitch& stop = detail::process_stop();
  struct sigaction action {};
  action.sa_handler = [](int) { detail::process_stop().request(); };
  sigaction(SIGTERM, &action, nullptr);
  try {
    model.load();
  } catch (...) {
    std::fprintf(stderr, "model '%s' failed to load: %s\n", options.name.c_str(),
                 detail::text_of_error().c_str());
    return EXIT_LOAD_FAILED;
  }
  try {
    if (options.all_servers || options.address.find(',') != std::string::npos)
      AllServers(model, std::move(options), stop).serve();
    else
      Container(model, std::move(options), stop).serve();
  } catch (const ContainerRejected& error) {
    std::fprintf(stderr, "the server rejected this container: %s\n", error.what());
    return EXIT_REJECTED;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_USAGE;
  }
  return 0;
}

}  // namespace clipper

#endif
