// Returns each row as it came: numbers of a free length, text or bytes. The words say the types.

#pragma once

#include <clipper/container.hpp>

class Echo : public clipper::Model {
 public:
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    for (std::size_t i = 0; i < batch.size(); i++) {
      if (batch.dtype() == clipper::DType::STR) {
        outputs.add(batch.text(i));
      } else if (batch.dtype() == clipper::DType::BYTES) {
        outputs.add_bytes(batch.text(i));
      } else {
        const auto row = batch.row<float>(i);
        outputs.add(row.data(), row.size());
      }
    }
  }
};

inline int run_echo(const char* input, const char* output) {
  Echo echo;
  return clipper::run(echo, {input, output});
}
