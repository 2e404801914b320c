#include "src/files.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <vector>

#include "src/error.h"
#include "test/support.h"

namespace jetlag {
namespace {

namespace fs = std::filesystem;

// The message of the Error that the call throws, or "" if it throws none.
template <typename Call>
std::string error_of(const Call& call) {
    try {
        call();
    } catch (const Error& e) {
        EXPECT_EQ(e.exit_code, kExitFailed);
        return e.what();
    }
    return "";
}

std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

TEST(Files, WritesAndReplaces) {
    test::TemporaryFolder folder;
    const fs::path path = folder.path / "file";
    const std::string binary("a\0b\n\xff", 5);
    write_file_atomically(path, binary);
    EXPECT_EQ(read_file(path), binary);
    write_file_atomically(path, "");
    EXPECT_EQ(read_file(path), "");
    const std::string large(3'000'000, 'x');
    write_file_atomically(path, large);
    EXPECT_EQ(read_file(path), large);
    EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"file"});
}

TEST(Files, ALeftoverTemporaryFileIsNoObstacle) {
    test::TemporaryFolder folder;
    write_file_atomically(folder.path / "file.tmp", "left by a killed process, longer than the new text");
    write_file_atomically(folder.path / "file", "new");
    EXPECT_EQ(read_file(folder.path / "file"), "new");
    EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"file"});
}

TEST(Files, WritesInTheCurrentFolder) {
    test::TemporaryFolder folder;
    const fs::path before = fs::current_path();
    fs::current_path(folder.path);
    const std::string error = error_of([] { write_file_atomically("plain", "text"); });
    fs::current_path(before);
    EXPECT_EQ(error, "");
    EXPECT_EQ(read_file(folder.path / "plain"), "text");
}

TEST(Files, FollowsSymbolicLinks) {
    test::TemporaryFolder folder;
    fs::create_directory(folder.path / "real");
    write_file_atomically(folder.path / "real" / "file", "old");
    fs::create_symlink("real/file", folder.path / "link");
    write_file_atomically(folder.path / "link", "new");
    EXPECT_TRUE(fs::is_symlink(folder.path / "link"));
    EXPECT_EQ(read_file(folder.path / "real" / "file"), "new");
}

TEST(Files, DevicesAreWrittenToAndNotReplaced) {
    write_file_atomically("/dev/null", "text");
    EXPECT_TRUE(fs::is_character_file("/dev/null"));
    EXPECT_EQ(error_of([] { write_file_atomically("/dev/full", "text"); }),
              "cannot write /dev/full: No space left on device");
    EXPECT_TRUE(fs::is_character_file("/dev/full"));
    EXPECT_FALSE(fs::exists("/dev/full.tmp"));
}

TEST(Files, WriteErrorsNamePathAndReason) {
    test::TemporaryFolder folder;
    const std::string missing = folder.path / "missing" / "file";
    EXPECT_EQ(error_of([&] { write_file_atomically(missing, "x"); }),
              "cannot write " + missing + ": No such file or directory");
    EXPECT_EQ(error_of([&] { write_file_atomically(folder.path, "x"); }),
              "cannot write " + folder.path.string() + ": Is a directory");
    EXPECT_NE(error_of([&] { write_file_atomically(folder.path / "", "x"); }), "");
    EXPECT_NE(error_of([&] { write_file_atomically("", "x"); }), "");
    const std::string long_name = folder.path / std::string(300, 'n');
    EXPECT_EQ(error_of([&] { write_file_atomically(long_name, "x"); }),
              "cannot write " + long_name + ": File name too long");
    EXPECT_TRUE(names_in(folder.path).empty());

    // The name of the temporary file is taken by a folder: refused, and the old file survives.
    write_file_atomically(folder.path / "file", "old");
    fs::create_directory(folder.path / "file.tmp");
    EXPECT_NE(error_of([&] { write_file_atomically(folder.path / "file", "new"); }), "");
    EXPECT_EQ(read_file(folder.path / "file"), "old");
}

// The Error's message from writing `text` to `path` in a child process, after `prepare` there.
template <typename Prepare>
std::string write_error_in_child(const fs::path& path, const std::string& text, const Prepare& prepare) {
    int ends[2];
    if (pipe(ends) != 0) return "no pipe";
    const pid_t child = fork();
    if (child == 0) {
        prepare();
        const std::string message = error_of([&] { write_file_atomically(path, text); });
        _exit(write(ends[1], message.data(), message.size()) == static_cast<ssize_t>(message.size()) ? 0 : 1);
    }
    close(ends[1]);
    const std::string message = read_file("/dev/fd/" + std::to_string(ends[0]));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0 ? message : "the child ended with status " + std::to_string(status);
}

TEST(Files, AReadOnlyFolderIsRefused) {
    test::TemporaryFolder folder;
    write_file_atomically(folder.path / "file", "old");
    fs::permissions(folder.path, fs::perms(0555));
    const std::string message = write_error_in_child(folder.path / "file", "new", [] {
        // Root may write anywhere, so the child gives root up.
        if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
    });
    fs::permissions(folder.path, fs::perms::owner_all);
    EXPECT_EQ(message, "cannot write " + (folder.path / "file").string() + ": Permission denied");
    EXPECT_EQ(read_file(folder.path / "file"), "old");
    EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"file"});
}

TEST(Files, AWriteThatFailsHalfwayLeavesTheOldFile) {
    test::TemporaryFolder folder;
    const fs::path path = folder.path / "file";
    write_file_atomically(path, "old");
    const std::string message = write_error_in_child(path, std::string(5000, 'x'), [] {
        // The file size limit stops the write after 1000 bytes as a full disk would.
        std::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit = {1000, 1000};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    });
    EXPECT_EQ(message, "cannot write " + path.string() + ": File too large");
    EXPECT_EQ(read_file(path), "old");
    EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"file"});
}

TEST(Files, AFullDiskLeavesTheOldFile) {
    test::TemporaryFolder folder;
    if (mount("tmpfs", folder.path.c_str(), "tmpfs", 0, "size=64k") != 0)
        GTEST_SKIP() << "mounting a small file system is not permitted here";
    write_file_atomically(folder.path / "file", "old");
    const std::string message =
        error_of([&] { write_file_atomically(folder.path / "file", std::string(100'000, 'x')); });
    const std::string survivor = read_file(folder.path / "file");
    const std::vector<std::string> names = names_in(folder.path);
    EXPECT_EQ(umount(folder.path.c_str()), 0);
    EXPECT_EQ(message, "cannot write " + (folder.path / "file").string() + ": No space left on device");
    EXPECT_EQ(survivor, "old");
    EXPECT_EQ(names, std::vector<std::string>{"file"});
}

TEST(Files, AKilledWriterLeavesTheOldFileOrTheNewOne) {
    test::TemporaryFolder folder;
    const fs::path path = folder.path / "file";
    const std::string old_text(200'000, 'o'), new_text(200'000, 'n');
    for (int microseconds = 0; microseconds < 20000; microseconds += 1000) {
        write_file_atomically(path, old_text);
        const pid_t child = fork();
        if (child == 0) {
            while (true) {
                write_file_atomically(path, new_text);
                write_file_atomically(path, old_text);
            }
        }
        usleep(static_cast<useconds_t>(microseconds));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        const std::string text = read_file(path);
        EXPECT_TRUE(text == old_text || text == new_text) << "after " << microseconds << " us: " << text.size();
    }
}

TEST(Files, ReadErrorsNamePathAndReason) {
    test::TemporaryFolder folder;
    const std::string missing = folder.path / "missing";
    EXPECT_EQ(error_of([&] { read_file(missing); }), "cannot read " + missing + ": No such file or directory");
    EXPECT_EQ(error_of([&] { read_file(folder.path); }), "cannot read " + folder.path.string() + ": Is a directory");
    EXPECT_EQ(error_of([] { read_file(""); }), "cannot read \"\": No such file or directory");
}

TEST(Files, ReadsFilesWithoutASize) {
    EXPECT_EQ(read_file("/dev/null"), "");
    EXPECT_NE(read_file("/proc/self/status").find("Pid:"), std::string::npos);
    // More than one buffer through a pipe.
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const std::string text(200'000, 'p');
    const pid_t child = fork();
    if (child == 0) {
        size_t written = 0;
        while (written < text.size()) written += static_cast<size_t>(write(ends[1], text.data(), 50'000));
        _exit(0);
    }
    close(ends[1]);
    EXPECT_EQ(read_file("/dev/fd/" + std::to_string(ends[0])), text);
    close(ends[0]);
    waitpid(child, nullptr, 0);
}

TEST(Files, MakesFolders) {
    test::TemporaryFolder folder;
    make_folder(folder.path / "a" / "b" / "c");
    EXPECT_TRUE(fs::is_directory(folder.path / "a" / "b" / "c"));
    EXPECT_NO_THROW(make_folder(folder.path / "a" / "b" / "c"));

    const fs::path file = folder.path / "file";
    write_file_atomically(file, "x");
    for (const fs::path& path : {file, file / "below"})
        EXPECT_EQ(error_of([&] { make_folder(path); }), "cannot create folder " + path.string() + ": Not a directory");
    EXPECT_NE(error_of([] { make_folder(""); }), "");
}

TEST(Files, Sha256) {
    // FIPS 180-2, appendix B, and the empty text.
    EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(sha256_hex(std::string(1'000'000, 'a')),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace jetlag
