// The models of the tests, in one program: the first word says which.

#include "echo.hpp"
#include "faulty.hpp"
#include "late.hpp"
#include "learner.hpp"
#include "picky.hpp"
#include "tensors.hpp"

int main(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "";
  if (name == "faulty") return run_faulty(count > 2);
  if (name == "learner") return run_learner(count > 2);
  if (name == "late") return run_late();
  if (name == "picky") return run_picky();
  if (name == "tensors") return run_tensors();
  if (name == "echo" && count > 3) return run_echo(words[2], words[3]);
  return clipper::EXIT_USAGE;
}
