// A model whose rows say what goes wrong. Rows are str; the output of a good row is its text.

#pragma once

#include <csignal>
#include <thread>

#include <clipper/container.hpp>

class Faulty : public clipper::Model {
 public:
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    for (std::size_t i = 0; i < batch.size(); i++) {
      const std::string_view text = batch.text(i);
      if (text == "throw") throw std::runtime_error("this row cannot be read\nat frame 0");
      if (text == "exit") std::exit(7);
      if (text == "kill") std::raise(SIGKILL);
      if (text == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
      if (text == "count") outputs.add("one more");
      if (text == "row") outputs.fail(i, "only this row");
      if (text == "large") outputs.add(std::string(std::size_t{65} << 20, 'x'));
      else outputs.add(text);
    }
  }
};

// Answers every batch with the id of another: what the SDK never sends.
inline int answer_unknown_ids(clipper::Options options) {
  using namespace clipper;
  options.from_environment();
  StopSwitch stop;
  Connection connection(connect_to(options.address), stop);
  connection.send(hello_frame(options, {}, false));
  read_welcome(connection);
  Outputs outputs;
  std::vector<std::uint8_t> reply;
  for (;;) {
    connection.next_message();
    const Header header = decode_header(connection.take(HEADER_BYTES));
    connection.take(header.payload_bytes);
    if (header.kind != Kind::PREDICT) continue;
    outputs.reset(header.rows);
    for (std::uint32_t i = 0; i < header.rows; i++) outputs.add("a reply to nobody");
    outputs.encode(header.id + 1000, 0, false, false, PAYLOAD_BYTES_MAX, reply);
    connection.send(reply.data(), reply.size());
  }
}

inline int run_faulty(bool unknown_ids) try {
  clipper::Options options("str", "str");
  if (unknown_ids) return answer_unknown_ids(options);
  Faulty model;
  return clipper::run(model, options);
} catch (const clipper::Disconnected& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
