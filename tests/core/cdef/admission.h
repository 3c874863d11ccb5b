struct ckv_admission_memory {
    struct ckv_admission_head *head;
    ...;
};
