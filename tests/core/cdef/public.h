/* All of cyclone_kv.h, as the preprocessor leaves it.
 * Made by scripts/public_cdef.py --write; not edited by hand. */

enum ckv_status {
    CKV_OK = 0,
    CKV_MISS = 1,
    CKV_PRESENT = 2,
    CKV_BUSY = 3,
    CKV_NO_RUN = 4,
    CKV_NOT_ADMITTED = 5,
    CKV_IN_FLIGHT = 6,
    CKV_FAILED_PATH = 7,
    CKV_IO_FAILED = 8,
    CKV_SHORT_BUFFER = 9,
    CKV_E_INVALID = -1,
    CKV_E_OS = -2,
    CKV_E_NO_MEMORY = -3,
    CKV_E_FORMAT = -4,
    CKV_E_MISMATCH = -5,
    CKV_E_UNSAFE_PATH = -6,
    CKV_E_TIMEOUT = -7,
    CKV_E_CLOSED = -8,
    CKV_E_FORKED = -9,
    CKV_E_TOO_LARGE = -10,
    CKV_E_NO_SLOT = -11,
    CKV_E_NO_NAMESPACE = -12,
    CKV_E_READ_ONLY = -13,
    CKV_E_NO_SPACE = -14,
    CKV_E_UNSUPPORTED = -15,
    CKV_E_MISSING_PATH = -16,
};

struct ckv_error {
    enum ckv_status status;
    int os_errno;
    char text[512];
};

const char *ckv_status_text(enum ckv_status status);

struct ckv_cache;

struct ckv_lease;

struct ckv_reservation;

struct ckv_key {
    const void *data;
    size_t length;
};

struct ckv_segment {
    const void *data;
    size_t length;
};

struct ckv_target {
    void *data;
    size_t length;
};

enum ckv_mode {
    CKV_MODE_READ_WRITE = 0,
    CKV_MODE_READ = 1,
};

enum ckv_verify {
    CKV_VERIFY_ONCE = 0,
    CKV_VERIFY_ALWAYS = 1,
    CKV_VERIFY_NEVER = 2,
};

enum ckv_admission {
    CKV_ADMISSION_ALWAYS = 0,
    CKV_ADMISSION_SECOND_TOUCH = 1,
    CKV_ADMISSION_ADAPTIVE = 2,
};

enum ckv_eviction {
    CKV_EVICTION_CLOCK = 0,
    CKV_EVICTION_PREFIX = 1,
};

enum ckv_on_mismatch {
    CKV_MISMATCH_RAISE = 0,
    CKV_MISMATCH_RECREATE = 1,
};

struct ckv_path {
    const char *path;
    uint64_t capacity_bytes;
};

struct ckv_options {
    const struct ckv_path *paths;
    size_t path_count;
    enum ckv_mode mode;
    enum ckv_verify verify;
    enum ckv_on_mismatch on_mismatch;
    enum ckv_admission admission;
    enum ckv_eviction eviction;
    uint64_t expected_object_bytes;
    uint32_t stripe_count;
    uint32_t file_mode;
    bool create;
    bool degraded;
    bool allow_shared_directory;
    bool allow_network_fs;
    bool allow_sparse;
    bool sigbus_guard;
    bool write_behind;
    const char *shm_directory;
    const void *namespace_data;
    size_t namespace_length;
    uint32_t open_timeout_ms;
    uint32_t sync_interval_ms;
    uint32_t io_threads;
    uint64_t page_table_budget_bytes;
    uint32_t event_capacity;
};

enum {
    CKV_PATHS_MAX = 16,
    CKV_PROCESSES_MAX = 64,
    CKV_NAMESPACES_MAX = 256,
};

void ckv_options_init(struct ckv_options *options);

enum ckv_status ckv_open(const struct ckv_options *options, struct ckv_cache **cache,
    struct ckv_error *error);

void ckv_close(struct ckv_cache **cache);

enum ckv_log_level {
    CKV_LOG_INFO = 0,
    CKV_LOG_WARNING = 1,
};

void ckv_set_log(void (*sink)(void *context, enum ckv_log_level level, const char
    *text), void *context);

enum ckv_put_flags {
    CKV_PUT_OVERWRITE = 1,
    CKV_PUT_CHAIN = 2,
};

struct ckv_item {
    struct ckv_key key;
    const struct ckv_segment *segments;
    size_t segment_count;
    const void *header;
    size_t header_length;
    enum ckv_status status;
};

enum ckv_status ckv_put(struct ckv_cache *cache, struct ckv_item *item, uint32_t flags,
    struct ckv_error *error);

enum ckv_status ckv_put_many(struct ckv_cache *cache, struct ckv_item *items, size_t
    count, uint32_t flags, const struct ckv_key *parent, struct ckv_error *error);

enum ckv_status ckv_reserve(struct ckv_cache *cache, const struct ckv_item *item, size_t
    payload_length, struct ckv_reservation **reservation, struct ckv_error *error);

void *ckv_reservation_data(struct ckv_reservation *reservation, size_t *payload_length);

enum ckv_status ckv_commit(struct ckv_reservation **reservation, uint32_t flags, struct
    ckv_error *error);

void ckv_abort(struct ckv_reservation **reservation);

enum ckv_status ckv_get(struct ckv_cache *cache, const struct ckv_key *key, struct
    ckv_lease **lease, struct ckv_error *error);

const void *ckv_lease_data(const struct ckv_lease *lease, size_t *payload_length);

const void *ckv_lease_header(const struct ckv_lease *lease, size_t *header_length);

bool ckv_lease_ok(const struct ckv_lease *lease);

void ckv_lease_release(struct ckv_lease **lease);

enum ckv_status ckv_locate(struct ckv_cache *cache, const struct ckv_key *key, struct
    ckv_lease **lease, int *fd, uint64_t *offset_bytes, struct ckv_error *error);

struct ckv_read {
    struct ckv_key key;
    const struct ckv_target *targets;
    size_t target_count;
    bool exact;
    uint64_t payload_length;
    enum ckv_status status;
};

enum ckv_status ckv_get_into(struct ckv_cache *cache, struct ckv_read *read, struct
    ckv_error *error);

enum ckv_status ckv_get_many_into(struct ckv_cache *cache, struct ckv_read *reads,
    size_t count, struct ckv_error *error);

enum ckv_status ckv_contains_many(struct ckv_cache *cache, const struct ckv_key *keys,
    size_t count, bool *present, struct ckv_error *error);

enum ckv_status ckv_longest_prefix(struct ckv_cache *cache, const struct ckv_key *keys,
    size_t count, bool touch, size_t *length, struct ckv_error *error);

enum ckv_status ckv_prefetch(struct ckv_cache *cache, const struct ckv_key *keys, size_t
    count, size_t *found, struct ckv_error *error);

enum ckv_status ckv_touch(struct ckv_cache *cache, const struct ckv_key *keys, size_t
    count, size_t *found, struct ckv_error *error);

struct ckv_hold;

struct ckv_chunk {
    const void *address;
    uint64_t length;
};

struct ckv_pin {
    struct ckv_key key;
    struct ckv_lease *lease;
    uint64_t payload_length;
    enum ckv_status status;
};

enum ckv_status ckv_hold_open(struct ckv_cache *cache, struct ckv_hold **hold, struct
    ckv_error *error);

size_t ckv_hold_chunks(const struct ckv_hold *hold);

const void *ckv_hold_volume(const struct ckv_hold *hold);

enum ckv_status ckv_hold_chunk(struct ckv_hold *hold, size_t index, struct ckv_chunk
    *chunk, struct ckv_error *error);

enum ckv_status ckv_hold_populate(struct ckv_hold *hold, size_t index, uint64_t offset,
    uint64_t length, struct ckv_error *error);

void ckv_hold_select(struct ckv_hold *hold, size_t index, bool selected);

void ckv_hold_release(struct ckv_hold **hold);

enum ckv_status ckv_get_selected(struct ckv_cache *cache, const struct ckv_hold *hold,
    struct ckv_pin *pins, size_t count, struct ckv_error *error);

enum ckv_status ckv_remove(struct ckv_cache *cache, const struct ckv_key *key, struct
    ckv_error *error);

enum ckv_status ckv_clear(struct ckv_cache *cache, uint64_t *removed, struct ckv_error
    *error);

enum ckv_status ckv_count(struct ckv_cache *cache, uint64_t *entries, struct ckv_error
    *error);

enum ckv_status ckv_sync(struct ckv_cache *cache, struct ckv_error *error);

struct ckv_verify_report {
    uint64_t entries_checked;
    uint64_t bytes_checked;
    uint64_t damaged_payloads;
    uint64_t unreadable;
    uint64_t structure_faults;
    uint64_t repaired;
    char first_fault[256];
};

enum ckv_status ckv_verify(struct ckv_cache *cache, bool repair, int (*progress)(void
    *context, uint64_t entries_done, uint64_t entries_total), void *context, struct
    ckv_verify_report *report, struct ckv_error *error);

enum ckv_status ckv_recover(struct ckv_cache *cache, uint64_t *recovered_paths, struct
    ckv_error *error);

enum ckv_event_kind {
    CKV_EVENT_STORED = 1,
    CKV_EVENT_REMOVED = 2,
    CKV_EVENT_CLEARED = 3,
};

struct ckv_event {
    uint64_t number;
    uint8_t namespace_tag[16];
    uint8_t key[32];
    uint8_t kind;
    bool digested;
};

enum ckv_status ckv_events(struct ckv_cache *cache, uint64_t since, struct ckv_event
    *events, size_t capacity, size_t *count, uint64_t *lost, uint64_t *last, struct
    ckv_error *error);

struct ckv_entry_info {
    uint8_t namespace_tag[16];
    uint8_t key[32];
    bool digested;
    bool verified;
    uint8_t heat;
    uint32_t path_index;
    uint32_t header_length;
    uint64_t offset_bytes;
    uint64_t payload_length;
    uint64_t sequence;
};

enum ckv_status ckv_list(struct ckv_cache *cache, uint64_t *cursor, struct
    ckv_entry_info *infos, size_t capacity, size_t *count, struct ckv_error *error);

struct ckv_stats {
    int64_t lookups;
    int64_t hits;
    int64_t misses;
    int64_t puts_stored;
    int64_t puts_present;
    int64_t puts_busy;
    int64_t puts_no_run;
    int64_t puts_not_admitted;
    int64_t puts_in_flight;
    int64_t puts_failed_path;
    int64_t puts_io_failed;
    int64_t evictions;
    int64_t evicted_bytes;
    int64_t bucket_evictions;
    int64_t entries_exhausted;
    int64_t removed;
    int64_t payload_bytes_written;
    int64_t page_bytes_written;
    int64_t payload_bytes_read;
    int64_t page_bytes_read;
    int64_t corrupt;
    int64_t read_errors;
    int64_t short_buffers;
    int64_t verified_blocks;
    int64_t verified_bytes;
    int64_t holes_filled;
    int64_t write_behind_bytes;
    int64_t readahead_bytes;
    int64_t chains_ignored;
    int64_t lock_waits;
    int64_t lock_successions;
    int64_t swept_slots;
    int64_t syncs;
    int64_t sync_failures;
    int64_t events_dropped;
    int64_t media_errors;
    int64_t map_failures;
    int64_t window_drops;
    int64_t direct_bytes;
    int64_t admission_asks_twice;
    int64_t admission_switches;
    int64_t admission_capacity;
    int64_t admission_requests;
    int64_t admission_misses_always;
    int64_t admission_misses_second_touch;
    int64_t eviction_prefix;
    int64_t density_accesses;
    int64_t density_rebuilds;
    int64_t capacity_bytes;
    int64_t entries_max;
    int64_t entries;
    int64_t resident_bytes;
    int64_t pinned_entries;
    int64_t pinned_bytes;
    int64_t doomed_bytes;
    int64_t holes;
    int64_t laps;
    int64_t longest_pin_seconds;
    int64_t longest_pin_pid;
    int64_t processes;
    int64_t last_sync_age_seconds;
    int64_t failed_paths;
    int64_t detached;
    int64_t rebuilt_entries;
    int64_t rebuild_dropped;
};

enum ckv_status ckv_get_stats(struct ckv_cache *cache, struct ckv_stats *volume, struct
    ckv_stats *process, struct ckv_error *error);

struct ckv_path_info {
    const char *path;
    const char *file_system;
    uint64_t file_bytes;
    uint64_t data_bytes;
    uint64_t data_offset_bytes;
    uint32_t stripe_count;
    uint32_t entry_count;
    uint64_t free_bytes;
    bool failed;
    bool detached;
    bool present;
};

struct ckv_info {
    uint8_t set_id[16];
    uint32_t format_version;
    uint32_t path_count;
    uint64_t payload_max_bytes;
    uint64_t overhead_bytes;
    uint64_t shm_bytes;
    const char *shm_path;
    const char *crc32c_kernel;
    struct ckv_path_info paths[CKV_PATHS_MAX];
};

enum ckv_status ckv_get_info(struct ckv_cache *cache, struct ckv_info *info, struct
    ckv_error *error);

uint32_t ckv_crc32c(uint32_t crc, const void *data, size_t length);
