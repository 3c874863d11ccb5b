/* check.h */

struct ckv_volume;

enum ckv_status ckv_check(struct ckv_volume *volume, bool repair,
    int (*progress)(void *context, uint64_t done, uint64_t total), void *context,
    struct ckv_verify_report *report, struct ckv_error *error);
bool ckv_check_recover_file(struct ckv_volume *volume, struct ckv_file *file);
