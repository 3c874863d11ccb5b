/* SPDX-License-Identifier: Apache-2.0 */
/* file_path.c: the safe way from a name to a descriptor (P1 to P3), locks, notes.
 *
 * What is looked at by name may change before it is opened by name.  So lstat() only
 * keeps us from opening a device and gives better sentences; what counts is asked of
 * the descriptor.  The name itself is safe because its directory is (P2).
 */
#include "file_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "slot.h"

enum {
    PATH_BYTES_MAX = 4095,
    OPEN_ATTEMPTS = 100, /* lost races against others who create and remove the file */
    DEFAULT_MODE = 0600  /* what is cached is made of other people's prompts */
};

#define LOCK_POLL_FIRST_NS UINT64_C(1000000)
#define LOCK_POLL_LAST_NS  UINT64_C(10000000)

/* ---- sentences ------------------------------------------------------------------ */

struct ckv_shown_path
ckv_file_shown(const char *path)
{
    struct ckv_shown_path shown;
    const size_t length = strlen(path);
    if (length < sizeof(shown.text)) {
        memcpy(shown.text, path, length + 1);
        return shown;
    }
    const char *end = path + length;
    const char *tail = end - (sizeof(shown.text) - sizeof("..."));
    while (tail < end && ((unsigned char)*tail & 0xc0u) == 0x80u) {
        tail++; /* begin with a whole UTF-8 character */
    }
    memcpy(shown.text, "...", 3);
    memcpy(shown.text + 3, tail, (size_t)(end - tail) + 1);
    return shown;
}

const char *
ckv_file_remedy(int os_errno)
{
    switch (os_errno) {
    case EACCES:
    case EPERM:
        return "; give this user read and write permission, or open with mode \"r\"";
    case EROFS:
        return "; the file system is mounted read-only: open with mode \"r\"";
    case EMFILE:
    case ENFILE:
        return "; raise the limit of open files (ulimit -n)";
    case ETXTBSY:
        return "; the file is being executed";
    default:
        return "";
    }
}

enum ckv_status
ckv_file_fail_os(struct ckv_error *error, int code, const char *what, const char *path)
{
    const int os_errno = -code;
    const enum ckv_status status =
        os_errno == ENOSPC || os_errno == EDQUOT || os_errno == EFBIG ? CKV_E_NO_SPACE
        : os_errno == ENOMEM                                          ? CKV_E_NO_MEMORY
                                                                      : CKV_E_OS;
    return ckv_fail(error, status, os_errno, "cannot %s \"%s\": %s%s", what,
        ckv_file_shown(path).text, strerror(os_errno), ckv_file_remedy(os_errno));
}

static enum ckv_status
fail_memory(struct ckv_error *error)
{
    return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "out of memory for a path");
}

/* ---- resolving (P1) ------------------------------------------------------------- */

/* "s3://", "file://": a letter, then letters, digits, "+", "-" or ".", then "://". */
static bool
looks_like_url(const char *path)
{
    const size_t scheme = strspn(path, "abcdefghijklmnopqrstuvwxyz"
                                       "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.");
    return scheme > 0 && strncmp(path + scheme, "://", 3) == 0;
}

static enum ckv_status
check_spelling(const char *path, struct ckv_error *error)
{
    if (path == NULL || path[0] == '\0') {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "the path is empty; give the path of a volume file");
    }
    if (strlen(path) > PATH_BYTES_MAX) {
        return ckv_fail(error, CKV_E_INVALID, ENAMETOOLONG,
            "the path has %zu bytes; at most %d are possible", strlen(path),
            PATH_BYTES_MAX);
    }
    if (looks_like_url(path)) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "\"%s\" is a URL; give a path of the local file system",
            ckv_file_shown(path).text);
    }
    if (path[0] == '~' && path[1] != '/') {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "\"%s\" begins with the home of another user, which is not looked up; give "
            "the full path, or \"./\" before a name that begins with \"~\"",
            ckv_file_shown(path).text);
    }
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    if (name[0] == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "\"%s\" names a directory; add the name of the volume file",
            ckv_file_shown(path).text);
    }
    return CKV_OK;
}

/* malloc'd concatenation, NULL without memory. */
static char *
join(const char *first, size_t first_length, const char *second)
{
    const size_t second_length = strlen(second);
    char *joined = malloc(first_length + second_length + 1);
    if (joined != NULL) {
        memcpy(joined, first, first_length);
        memcpy(joined + first_length, second, second_length + 1);
    }
    return joined;
}

static enum ckv_status
expand_home(const char *path, char **expanded, struct ckv_error *error)
{
    const char *home = "";
    if (path[0] == '~') {
        home = getenv("HOME");
        if (home == NULL || home[0] == '\0') {
            return ckv_fail(error, CKV_E_INVALID, 0,
                "\"%s\" needs the variable HOME, which is not set; give the full path",
                ckv_file_shown(path).text);
        }
        path++;
    }
    *expanded = join(home, strlen(home), path);
    return *expanded == NULL ? fail_memory(error) : CKV_OK;
}

/* Resolves everything before `name`, which points into `path`. */
static enum ckv_status
resolve_directory(const char *path, const char *name, char **directory,
    struct ckv_error *error)
{
    /* The dot makes a file in the place of the directory an error. */
    char *asked = join(path, (size_t)(name - path), ".");
    if (asked == NULL) {
        return fail_memory(error);
    }
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.resolve_path(asked, directory);
    }
    enum ckv_status status = CKV_OK;
    if (result == -ENOENT || result == -ENOTDIR) {
        asked[strlen(asked) - 1] = '\0';
        status = ckv_fail(error, CKV_E_OS, -result,
            "the directory \"%s\" does not exist; create it first (variables such as "
            "$HOME are not expanded)",
            ckv_file_shown(asked).text);
    } else if (result < 0) {
        status = ckv_file_fail_os(error, result, "resolve", path);
    }
    free(asked);
    return status;
}

enum ckv_status
ckv_file_resolve(const char *path, char **resolved, struct ckv_error *error)
{
    *resolved = NULL;
    CKV_TRY(check_spelling(path, error));
    char *expanded = NULL;
    CKV_TRY(expand_home(path, &expanded, error));

    const char *slash = strrchr(expanded, '/');
    const char *name = slash == NULL ? expanded : slash + 1;
    char *directory = NULL;
    enum ckv_status status = resolve_directory(expanded, name, &directory, error);
    if (status == CKV_OK) {
        char *with_slash =
            join(directory, strcmp(directory, "/") == 0 ? 0 : strlen(directory), "/");
        if (with_slash != NULL) {
            *resolved = join(with_slash, strlen(with_slash), name);
        }
        free(with_slash);
        if (*resolved == NULL) {
            status = fail_memory(error);
        }
    }
    free(directory);
    free(expanded);
    return status;
}

/* ---- what may be opened (P1 to P3) ---------------------------------------------- */

bool
ckv_file_trusted_owner(const struct ckv_options *options, uint32_t owner)
{
    return options->allow_shared_directory || owner == 0 || owner == ckv_os.user_id();
}

enum ckv_status
ckv_file_check_directory(const struct ckv_options *options, const char *resolved,
    struct ckv_error *error)
{
    const char *slash = strrchr(resolved, '/');
    CKV_CHECK(slash != NULL);
    const size_t length = slash == resolved ? 1 : (size_t)(slash - resolved);
    char *directory = join(resolved, length, "");
    if (directory == NULL) {
        return fail_memory(error);
    }
    struct stat info;
    const int result = ckv_os.stat_path(directory, &info);
    enum ckv_status status = CKV_OK;
    if (result < 0) {
        status = ckv_file_fail_os(error, result, "look at the directory", directory);
    } else if (!S_ISDIR(info.st_mode)) {
        status = ckv_fail(error, CKV_E_OS, ENOTDIR, "\"%s\" is not a directory",
            ckv_file_shown(directory).text);
    } else if (!ckv_file_trusted_owner(options, info.st_uid)) {
        status = ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
            "the directory \"%s\" belongs to user %u, who could replace the volume; "
            "use "
            "a directory of your own, or set allow_shared_directory",
            ckv_file_shown(directory).text, (unsigned int)info.st_uid);
    } else if (!options->allow_shared_directory && (info.st_mode & S_IWOTH) != 0 &&
               (info.st_mode & S_ISVTX) == 0) {
        status = ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
            "everybody can write to the directory \"%s\" (mode %04o), and so replace "
            "the "
            "volume; use chmod o-w or chmod +t, or set allow_shared_directory",
            ckv_file_shown(directory).text, (unsigned int)(info.st_mode & 07777u));
    }
    free(directory);
    return status;
}

static const char *
kind_of(mode_t mode)
{
    switch (mode & (mode_t)S_IFMT) {
    case S_IFLNK:
        return "a symbolic link";
    case S_IFDIR:
        return "a directory";
    case S_IFIFO:
        return "a FIFO";
    case S_IFSOCK:
        return "a socket";
    case S_IFCHR:
        return "a character device";
    case S_IFBLK:
        return "a block device";
    default:
        return "no regular file";
    }
}

static enum ckv_status
check_regular(const char *path, mode_t mode, struct ckv_error *error)
{
    if (S_ISREG(mode)) {
        return CKV_OK;
    }
    return ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
        "\"%s\" is %s; a volume is a regular file, and links are not followed: give "
        "the "
        "path of the file itself",
        ckv_file_shown(path).text, kind_of(mode));
}

static enum ckv_status
check_file_system(const struct ckv_options *options, const char *path,
    const struct ckv_file_system *file_system, struct ckv_error *error)
{
    const bool remote =
        file_system->kind == CKV_FS_NETWORK || file_system->kind == CKV_FS_FUSE;
    if (remote && !options->allow_network_fs) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, 0,
            "\"%s\" lies on %s, where mappings and locks do not hold between hosts or "
            "servers; use a local disk, or set allow_network_fs",
            ckv_file_shown(path).text, file_system->name);
    }
    if (file_system->kind == CKV_FS_COW && options->mode != CKV_MODE_READ &&
        !options->allow_sparse) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, 0,
            "\"%s\" lies on %s, which cannot reserve space; use another file system, "
            "or "
            "set allow_sparse",
            ckv_file_shown(path).text, file_system->name);
    }
    if (remote || file_system->kind == CKV_FS_OVERLAY) {
        ckv_log(CKV_LOG_WARNING,
            "\"%s\" lies on %s: what is below may be slow, and may not keep what a "
            "sync "
            "promises",
            ckv_file_shown(path).text, file_system->name);
    }
    return CKV_OK;
}

/* Asks the descriptor what the name could not answer, and keeps the answers. */
static enum ckv_status
examine(const struct ckv_options *options, const char *path, struct ckv_file *file,
    struct ckv_error *error)
{
    struct stat info;
    int result = ckv_os.stat_file(file->data_fd, &info);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "look at", path);
    }
    CKV_TRY(check_regular(path, info.st_mode, error));
    if (info.st_nlink == 0) {
        return CKV_BUSY; /* removed since it was opened */
    }
    if (!ckv_file_trusted_owner(options, info.st_uid)) {
        return ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
            "\"%s\" belongs to user %u, who may have planted its content; remove it, "
            "or "
            "set allow_shared_directory",
            ckv_file_shown(path).text, (unsigned int)info.st_uid);
    }
    if (info.st_nlink > 1) {
        ckv_log(CKV_LOG_WARNING,
            "\"%s\" has %llu hard links: the volume can be reached, and changed, under "
            "other names",
            ckv_file_shown(path).text, (unsigned long long)info.st_nlink);
    }
    result = ckv_os.file_system(file->data_fd, &file->file_system);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "find the file system of", path);
    }
    file->device = (uint64_t)info.st_dev;
    file->inode = (uint64_t)info.st_ino;
    return check_file_system(options, path, &file->file_system, error);
}

/* CKV_MISS: not there.  CKV_BUSY: a race was lost, try again. */
static enum ckv_status
open_existing(const struct ckv_options *options, const char *path,
    struct ckv_file *file, struct ckv_error *error)
{
    struct stat info;
    const int result = ckv_os.lstat_path(path, &info);
    if (result == -ENOENT) {
        return CKV_MISS;
    }
    if (result < 0) {
        return ckv_file_fail_os(error, result, "look at", path);
    }
    CKV_TRY(check_regular(path, info.st_mode, error));

    /* Not blocking: whoever puts a FIFO here now must not hang us. */
    const int access = options->mode == CKV_MODE_READ ? O_RDONLY : O_RDWR;
    const int fd = ckv_os_open(path, access | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (fd == -ENOENT) {
        return CKV_MISS;
    }
    if (fd == -ELOOP) {
        return CKV_BUSY; /* a link since lstat(), which will say so */
    }
    if (fd < 0) {
        return ckv_file_fail_os(error, fd, "open", path);
    }
    file->data_fd = fd;
    return examine(options, path, file, error);
}

static enum ckv_status
create_new(const struct ckv_options *options, const char *path, struct ckv_file *file,
    struct ckv_error *error)
{
    const mode_t mode =
        (mode_t)(options->file_mode == 0 ? DEFAULT_MODE : options->file_mode);
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    const int fd = ckv_os_open(path, flags, mode);
    if (fd == -EEXIST) {
        return CKV_BUSY;
    }
    if (fd < 0) {
        return ckv_file_fail_os(error, fd, "create", path);
    }
    file->data_fd = fd;
    file->created = true;
    const int result = ckv_os.change_mode(fd, mode); /* the umask had its say */
    if (result < 0) {
        return ckv_file_fail_os(error, result, "set the mode of", path);
    }
    return examine(options, path, file, error);
}

/* Undoes one attempt.  The new file is still empty and may be in use by somebody who
 * found it, so it goes only if nobody has or wants its lock. */
static void
undo_open(const char *path, struct ckv_file *file)
{
    if (file->data_fd < 0) {
        return;
    }
    if (file->created) {
        struct stat opened;
        struct stat named;
        const bool empty =
            ckv_os.stat_file(file->data_fd, &opened) == 0 && opened.st_size == 0 &&
            ckv_os.lstat_path(path, &named) == 0 && named.st_dev == opened.st_dev &&
            named.st_ino == opened.st_ino;
        if (empty && ckv_os_lock_byte(file->data_fd, CKV_OPEN_LOCK_BYTE) == 0) {
            (void)ckv_os.unlink_path(path); /* best effort: the error is on its way */
        }
    }
    (void)ckv_os.close_file(file->data_fd); /* nothing was written; ends the lock */
    file->data_fd = -1;
    file->created = false;
}

void
ckv_file_withdraw(struct ckv_file *file)
{
    undo_open(file->path, file);
    file->present = false;
}

static enum ckv_status
open_or_create(const struct ckv_options *options, const char *path,
    struct ckv_file *file, struct ckv_error *error)
{
    const bool create = options->create && options->mode != CKV_MODE_READ;
    for (int attempt = 0; attempt < OPEN_ATTEMPTS; attempt++) {
        enum ckv_status status = open_existing(options, path, file, error);
        if (status == CKV_MISS && create) {
            status = create_new(options, path, file, error);
        }
        if (status == CKV_OK || status == CKV_MISS) {
            return status;
        }
        undo_open(path, file);
        if (status != CKV_BUSY) {
            return status;
        }
    }
    return ckv_fail(error, CKV_E_TIMEOUT, 0,
        "\"%s\" kept changing while it was opened; end whoever creates and removes it",
        ckv_file_shown(path).text);
}

enum ckv_status
ckv_file_open(const struct ckv_options *options, const char *resolved,
    struct ckv_file *file, struct ckv_error *error)
{
    memset(file, 0, sizeof(*file));
    file->data_fd = -1;
    if ((options->file_mode & ~0777u) != 0) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "file_mode %#o has more than permission bits; use a value such as 0600",
            options->file_mode);
    }
    CKV_TRY(ckv_file_check_directory(options, resolved, error));
    char *path = join(resolved, strlen(resolved), "");
    if (path == NULL) {
        return fail_memory(error);
    }
    const enum ckv_status status = open_or_create(options, resolved, file, error);
    if (status != CKV_OK && status != CKV_MISS) {
        free(path);
        return status;
    }
    file->path = path;
    file->present = status == CKV_OK;
    if (file->present) {
        (void)pthread_mutex_init(&file->header_lock,
            NULL); /* cannot fail: no attributes */
    }
    return status;
}

/* ---- the same inode again ------------------------------------------------------- */

static bool
same_inode(const struct ckv_file *file, const struct stat *info)
{
    return (uint64_t)info->st_dev == file->device &&
           (uint64_t)info->st_ino == file->inode;
}

bool
ckv_file_attached(const struct ckv_file *file)
{
    struct stat info;
    return ckv_os.lstat_path(file->path, &info) == 0 && same_inode(file, &info);
}

static int
open_checked(const struct ckv_file *file, const char *path, int flags)
{
    const int fd = ckv_os_open(path, flags, 0);
    if (fd < 0) {
        return fd;
    }
    struct stat info;
    int result = ckv_os.stat_file(fd, &info);
    if (result == 0 && !same_inode(file, &info)) {
        result = -ESTALE;
    }
    if (result < 0) {
        (void)ckv_os.close_file(fd); /* nothing was done with it */
        return result;
    }
    return fd;
}

int
ckv_file_reopen(const struct ckv_file *file, int flags)
{
#ifdef __linux__
    /* Finds the inode wherever its name went.  Needs /proc. */
    char link[48];
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", file->data_fd);
    const int fd = open_checked(file, link, flags);
    if (fd != -ENOENT && fd != -ESTALE && fd != -ELOOP) {
        return fd;
    }
#endif
    return open_checked(file, file->path, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
}

/* ---- the open lock and the note ------------------------------------------------- */

void
ckv_file_compose_note(char note[CKV_PAGE_BYTES], const char *doing)
{
    memset(note, 0, CKV_PAGE_BYTES);
    (void)snprintf(note, CKV_PAGE_BYTES, CKV_NOTE_PREFIX "%s, process %lld (%s)\n",
        doing, (long long)ckv_os.process_id(), ckv_os.program_name());
}

void
ckv_file_write_note(const struct ckv_file *file, const char *doing)
{
    bool blank = true;
    if (file->header.magic != CKV_FORMAT_MAGIC &&
        (!ckv_file_is_ours(file) || ckv_file_is_blank(file, &blank, NULL) != CKV_OK ||
            blank)) {
        return; /* what is not ours must not be written to (P4), and the note of an
                   unfinished file is what tells that it is one */
    }
    char note[CKV_PAGE_BYTES];
    ckv_file_compose_note(note, doing);
    /* For people alone: a note that cannot be written is no reason to stop. */
    (void)ckv_os_write_all(file->data_fd, note, sizeof(note), CKV_NOTE_OFFSET);
}

enum ckv_status
ckv_file_fail_locked(const struct ckv_file *file, struct ckv_error *error)
{
    char note[161] = {0};
    const size_t prefix = strlen(CKV_NOTE_PREFIX);
    const char *says = "it left no note";
    if (ckv_os_read_all(file->data_fd, note, sizeof(note) - 1, CKV_NOTE_OFFSET) == 0 &&
        strncmp(note, CKV_NOTE_PREFIX, prefix) == 0) {
        for (size_t i = prefix; note[i] != '\0'; i++) {
            if (note[i] < ' ' || note[i] > '~') { /* the file is input */
                note[i] = '\0';
                break;
            }
        }
        says = note + prefix;
    }
    return ckv_fail(error, CKV_E_TIMEOUT, 0,
        "another process kept \"%s\" locked past the timeout (%s); wait for it, end "
        "it, or "
        "raise open_timeout",
        ckv_file_shown(file->path).text, says);
}

/* One attempt.  0 with *lock_fd set and forks blocked, or -errno with neither. */
static int
try_lock(const struct ckv_file *file, int *lock_fd)
{
    ckv_slot_fork_block(); /* no child may inherit a description that gets the lock */
    const int fd = ckv_file_reopen(file, O_RDWR);
    const int result = fd < 0 ? fd : ckv_os_lock_byte(fd, CKV_OPEN_LOCK_BYTE);
    if (result == 0) {
        *lock_fd = fd;
        return 0;
    }
    if (fd >= 0) {
        (void)ckv_os.close_file(fd); /* it owns nothing */
    }
    ckv_slot_fork_unblock();
    return result;
}

enum ckv_status
ckv_file_lock_open(struct ckv_file *file, uint64_t deadline_ns, int *lock_fd,
    struct ckv_error *error)
{
    *lock_fd = -1;
    int fd = -1;
    uint64_t pause_ns = LOCK_POLL_FIRST_NS;
    /* Polling instead of F_OFD_SETLKW: that has no timeout, and forks are let through
     * between two attempts. */
    for (int result = try_lock(file, &fd); result != 0; result = try_lock(file, &fd)) {
        if (result == -ESTALE) {
            return CKV_BUSY;
        }
        if (result != -EAGAIN) {
            ckv_file_withdraw(file);
            return ckv_file_fail_os(error, result, "lock", file->path);
        }
        if (ckv_os.monotonic_ns() >= deadline_ns) {
            return ckv_file_fail_locked(file, error);
        }
        ckv_os.sleep_ns(pause_ns);
        pause_ns = ckv_min_u64(2 * pause_ns, LOCK_POLL_LAST_NS);
    }
    if (!ckv_file_attached(file)) {
        (void)ckv_os.close_file(fd); /* ends the lock */
        ckv_slot_fork_unblock();
        return CKV_BUSY;
    }
    *lock_fd = fd;
    return CKV_OK;
}
