// cuBLAS is taken at run time from the process, never linked: its SONAME and symbol versions differ between CUDA 11, 12 and 13.
#pragma once

#include <string>

namespace upfold::cuda {

struct CublasFound {
  std::string path;     // the library's file, or empty
  std::string version;  // "major.minor.patch"
  std::string reason;   // why none was found, or empty
};

// The library that torch has already loaded, else the first that the loader finds by name. Loaded once, never closed.
CublasFound find_cublas();

}  // namespace upfold::cuda
