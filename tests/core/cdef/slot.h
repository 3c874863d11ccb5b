/* slot.h */

struct ckv_volume;

enum ckv_status ckv_slot_claim(struct ckv_volume *volume, struct ckv_error *error);
void ckv_slot_leave(struct ckv_volume *volume);
int ckv_slot_any_alive(struct ckv_file *const *files, uint32_t count);
bool ckv_slot_alive(struct ckv_volume *volume, uint32_t slot, uint32_t incarnation);
bool ckv_slot_sweep(struct ckv_volume *volume, uint32_t slot);
uint64_t ckv_slot_sweep_dead(struct ckv_volume *volume, uint64_t mask);
void ckv_slot_fork_block(void);
void ckv_slot_fork_unblock(void);
