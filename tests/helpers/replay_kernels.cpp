// Makes calls of the kernels once more that test_portability.py recorded, on whatever CPU this and
// the library are compiled for:  replay_kernels LIBRARY CALLS RESULTS
//
// Numbers are int64. CALLS: how many; of each the length of its name and the name, the length of its
// struct and the struct; how many buffers, of each its length and bytes; how many pointers, of each
// the buffer that it stands in (-1: the struct) and its place there, the buffer that it points to
// and the place there. RESULTS: the status of each call, then its buffers.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "replay_kernels: %s\n", why);
    std::exit(2);
}

struct Reader {
    std::FILE* file;

    void bytes(void* to, int64_t count) {
        if (count && std::fread(to, 1, static_cast<size_t>(count), file) != size_t(count))
            fail("the file of calls ends too early");
    }
    int64_t number() {
        int64_t value;
        bytes(&value, sizeof value);
        return value;
    }
    std::string text() {
        std::string to(static_cast<size_t>(number()), '\0');
        bytes(to.data(), static_cast<int64_t>(to.size()));
        return to;
    }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 4) fail("needs LIBRARY CALLS RESULTS");
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror());
    Reader calls{std::fopen(arguments[2], "rb")};
    std::FILE* results = std::fopen(arguments[3], "wb");
    if (!calls.file || !results) fail("cannot open the files");
    for (int64_t left = calls.number(); left > 0; left--) {
        const std::string name = calls.text();
        std::string record = calls.text();
        std::vector<std::string> buffers;
        std::vector<char*> copies;
        for (int64_t n = calls.number(); n > 0; n--) {
            buffers.push_back(calls.text());
            const size_t size = (buffers.back().size() + 64) / 64 * 64;
            copies.push_back(static_cast<char*>(std::aligned_alloc(64, size)));
            std::memcpy(copies.back(), buffers.back().data(), buffers.back().size());
        }
        for (int64_t n = calls.number(); n > 0; n--) {
            const int64_t holder = calls.number(), place = calls.number(), buffer = calls.number();
            const char* at = copies.at(static_cast<size_t>(buffer)) + calls.number();
            char* from = holder < 0 ? record.data() : copies.at(static_cast<size_t>(holder));
            std::memcpy(from + place, &at, sizeof at);
        }
        auto function = reinterpret_cast<int (*)(int, const void*)>(dlsym(library, name.c_str()));
        if (!function) fail(dlerror());
        const int64_t status = function(0, record.data());
        std::fwrite(&status, sizeof status, 1, results);
        for (size_t i = 0; i < copies.size(); i++) {
            std::fwrite(copies[i], 1, buffers[i].size(), results);
            std::free(copies[i]);
        }
    }
    return std::fclose(results);
}
