// Named tensors: the sum of the ids, which is not negative, and each name twice. The schemas are those
// of the server.

#pragma once

#include <numeric>

#include <clipper/container.hpp>

class Tensors : public clipper::Model {
 public:
  explicit Tensors(const clipper::Options& options)
      : inputs_(clipper::Schema::parse(options.input)),
        outputs_(clipper::Schema::parse(options.output)) {}

  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    for (std::size_t i = 0; i < batch.size(); i++) {
      const clipper::Record row = clipper::record_of(inputs_, batch, i);
      const auto ids = row.values<std::int64_t>("ids");
      const auto sum = std::accumulate(ids.begin(), ids.end(), std::int64_t{0});
      if (sum < 0) throw std::range_error("a negative sum");
      clipper::RecordWriter writer(outputs_);
      *writer.values<std::int64_t>("sum") = sum;
      if (outputs_.specs().size() > 1) {
        const std::string_view name = row.texts("name")[0];
        writer.texts("names", {name, name});
      }
      clipper::put_record(outputs_, writer, outputs, i);
    }
  }

 private:
  clipper::Schema inputs_, outputs_;
};

inline int run_tensors() {
  clipper::Options options;
  options.from_environment();
  Tensors model(options);
  return clipper::run(model, options);
}
