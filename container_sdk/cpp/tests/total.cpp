// A model whose output is the sum of a row.

#include <clipper/container.hpp>

struct Total : clipper::Model {
  void predict(const clipper::Batch& batch, clipper::Outputs& outputs) override {
    double* to = outputs.values<double>();
    for (std::size_t i = 0; i < batch.size(); i++)
      to[i] = batch.row<double>(i)[0] + batch.row<double>(i)[1];
  }
};

int main() {
  Total total;
  return clipper::run(total, {"f64[2]", "f64"});
}
