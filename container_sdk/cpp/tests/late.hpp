// A model that does nothing, and loads until a line is on its input.

#pragma once

#include <iostream>

#include <clipper/container.hpp>

struct Late : clipper::Model {
  void load() override {
    std::fputs("loads\n", stderr);
    std::string line;
    std::getline(std::cin, line);
  }
  void predict(const clipper::Batch&, clipper::Outputs& outputs) override {
    outputs.values<double>();
  }
};

inline int run_late() {
  Late late;
  return clipper::run(late, {"any", "f64"});
}
