#include "cublas.h"

#include <mutex>

#include "../error.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace upfold::cuda {
namespace {

#ifdef _WIN32
constexpr const char* kNames[] = {"cublas64_13.dll", "cublas64_12.dll", "cublas64_11.dll"};

void* open_loaded(const char* name) { return reinterpret_cast<void*>(GetModuleHandleA(name)); }
void* open_by_name(const char* name) { return reinterpret_cast<void*>(LoadLibraryA(name)); }
void* symbol_of(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
std::string path_of(void* library, void*) {
  char path[MAX_PATH] = "";
  const DWORD size = GetModuleFileNameA(reinterpret_cast<HMODULE>(library), path, MAX_PATH);
  return std::string(path, size);
}
#else
constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};

#ifdef RTLD_NOLOAD
void* open_loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }
#else
void* open_loaded(const char*) { return nullptr; }
#endif
void* open_by_name(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_LOCAL); }
void* symbol_of(void* library, const char* name) { return dlsym(library, name); }
std::string path_of(void*, void* symbol) {
  Dl_info where{};
  return dladdr(symbol, &where) != 0 && where.dli_fname != nullptr ? where.dli_fname : "";
}
#endif

// cublasGetProperty(libraryPropertyType, int*): needs no handle, hence no GPU; 0, 1, 2 = major, minor, patch.
using GetProperty = int (*)(int, int*);

CublasFound describe(void* library, const char* name) {
  void* symbol = symbol_of(library, "cublasGetProperty");
  if (symbol == nullptr) return {"", "", concat(name, " has no cublasGetProperty")};
  int version[3] = {0, 0, 0};
  for (int part = 0; part < 3; ++part) {
    const int status = reinterpret_cast<GetProperty>(symbol)(part, &version[part]);
    if (status != 0) return {"", "", concat(name, ": cublasGetProperty answered ", status)};
  }
  return {path_of(library, symbol), concat(version[0], ".", version[1], ".", version[2]), ""};
}

CublasFound search() {
  for (const char* name : kNames) {
    if (void* library = open_loaded(name)) return describe(library, name);
  }
  for (const char* name : kNames) {
    if (void* library = open_by_name(name)) return describe(library, name);
  }
  return {"", "", concat("neither torch nor the loader has ", kNames[0], ", ", kNames[1], " or ", kNames[2])};
}

}  // namespace

CublasFound find_cublas() {
  // A miss is asked again: torch may load its cuBLAS later.
  static std::mutex mutex;
  static CublasFound found;
  const std::lock_guard<std::mutex> lock(mutex);
  if (found.version.empty()) found = search();
  return found;
}

}  // namespace upfold::cuda
