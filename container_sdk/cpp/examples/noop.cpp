// A model that does nothing: the output of each row is 0.

#include <clipper/container.hpp>

struct Noop : clipper::Model {
  void predict(const clipper::Batch&, clipper::Outputs& outputs) override {
    outputs.values<double>();
  }
};

int main() {
  Noop noop;
  return clipper::run(noop, {"any", "f64"});
}
