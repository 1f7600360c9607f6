// A model of f64 rows that throws for a negative first element. The output of a row is its first
// element, as often as the largest second element of the batch says; of 1000 alone it is a scalar.
// The confidence is a tenth of the second element; a session is a qualifier.

#pragma once

#include <clipper/container.hpp>

class Picky : public clipper::Model {
 public:
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    std::uint32_t width = 1;
    for (std::size_t i = 0; i < batch.size(); i++) {
      const auto row = batch.row<double>(i);
      if (row[0] < 0) throw std::range_error("a negative row");
      if (row[0] == 0) throw 5;
      width = std::max(width, static_cast<std::uint32_t>(row[1]));
    }
    const bool is_scalar = batch.size() == 1 && batch.row<double>(0)[0] == 1000;
    double* to = is_scalar ? outputs.values<double>() : outputs.values<double>({width});
    for (std::size_t i = 0; i < batch.size(); i++) {
      const auto row = batch.row<double>(i);
      std::fill_n(to + i * width, width, row[0]);
      if (row[1] > 0) outputs.confidence()[i] = static_cast<float>(row[1] / 10);
      if (const std::uint64_t session = batch.session(i)) {
        clipper::MapWriter map(1);
        map.number("s", session);
        outputs.qualify(i, map.bytes());
      }
    }
  }
};

inline int run_picky() {
  Picky picky;
  clipper::Options options("any", "any");
  options.retry_singly = options.sessions = true;
  return clipper::run(picky, options);
}
