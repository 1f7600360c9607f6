// clock_cache.hpp: a bucket's sequence lock, read without a lock; its blobs; the bit map beside it.
#include "checker.hpp"
#include "cache/clock_cache.hpp"

namespace schedules {
namespace {

using Bucket = clipper::Bucket<Model>;
using clipper::Found;

// Keys 1 to 9 have a lo of their own and share their hi; 11 to 19 have the lo of 1 to 9 and another hi. The n-th value of key k:
// word 1000 k + n, tag 1 + n.
uint64_t lo_of(int key) { return 100 + uint64_t(key % 10); }
uint64_t hi_of(int key) { return 7 + uint64_t(key / 10); }

struct Table {
    Bucket bucket;
    Table() {
        name(bucket.sequence, "sequence");
        name(bucket.referenced, "referenced");
        for (int w = 0; w < clipper::kWays; ++w) {
            name(bucket.lo[w], "lo", w);
            name(bucket.hi[w], "hi", w);
            name(bucket.word[w], "word", w);
        }
        bucket.hand = 0;
    }
    static Found value(int key, int n) { return {uint64_t(1000 * key + n), uint8_t(1 + n)}; }
    void put(int key, int n) {
        bool evicted;
        uint32_t sequence = clipper::bucket_lock(bucket);
        clipper::bucket_fill(bucket, lo_of(key), hi_of(key), value(key, n), &evicted);
        clipper::bucket_unlock(bucket, sequence);
    }
    void take(int key) {
        uint32_t sequence = clipper::bucket_lock(bucket);
        int way = clipper::bucket_way(bucket, lo_of(key), hi_of(key));
        if (way >= 0) clipper::bucket_take(bucket, way);
        if (way >= 0) clipper::bucket_unlock(bucket, sequence);
        else clipper::bucket_unlock_unchanged(bucket, sequence);
    }
    void hold_and_let_go() {  // the lock, without a change
        uint32_t sequence = clipper::bucket_lock(bucket);
        clipper::bucket_unlock_unchanged(bucket, sequence);
    }
    int find(int key) {  // which value; 0: none. Never another key's, never half of one.
        Found found = clipper::bucket_find(bucket, lo_of(key), hi_of(key));
        if (!found.tag) return 0;
        EXPECT(found.word / 1000 == uint64_t(key), "a value of another key");
        EXPECT(found.tag == 1 + found.word % 1000, "a torn value: its tag is another's");
        return int(found.word % 1000);
    }
};

// One thread changes the bucket, one looks.
struct Seqlock : Scenario {
    enum What { replace, move, over, evict, unchanged };
    What what;
    int looks, writers;
    Table table;
    Seqlock(What w, int n, int t) : what(w), looks(n), writers(t) {
        table.put(1, 1);
        if (what == evict)
            for (int key = 2; key <= clipper::kWays; ++key) table.put(key, 1);
    }
    int threads() const override { return writers + 1; }
    void write() {
        if (what == replace || what == unchanged) table.put(1, 2);
        if (what == unchanged && writers == 1) table.hold_and_let_go();
        if (what == evict) table.put(9, 1);
        if (what == over) table.put(11, 1);
        if (what == move) {
            table.take(1);
            table.put(2, 1);  // into the way that key 1 has left
        }
    }
    void look(int key) {
        int before = 0;
        for (int i = 0; i < looks; ++i) {
            int n = table.find(key);
            EXPECT(n <= 2, "a value that nobody put");
            if (what == replace || what == unchanged) {
                EXPECT(n >= 1, "a key that is there throughout is not found");
                EXPECT(n >= before, "an old value comes back");
            }
            before = n;
        }
    }
    void run(int t) override {
        if (t == 1) write();
        else if (t == 3) table.hold_and_let_go();
        else look(what == evict ? 9 : 1);
    }
    void finish() override {
        if (what == replace || what == unchanged) EXPECT(table.find(1) == 2, "the last value is lost");
        if (what == move) EXPECT(table.find(1) == 0 && table.find(2) == 1, "moved");
        if (what == over) EXPECT(table.find(1) == 0 && table.find(11) == 1, "over the same lo");
        if (what == evict) EXPECT(table.find(9) == 1 && table.find(1) == 0, "the first key made room");
    }
};
SCENARIO(Seqlock, "clock_cache", seqlock_replace, "a value is replaced while it is read twice", Seqlock::replace, 2, 1);
SCENARIO(Seqlock, "clock_cache", seqlock_put_evict_put, "a key leaves and another takes its way", Seqlock::move, 1, 1);
SCENARIO(Seqlock, "clock_cache", seqlock_same_lo, "a key takes the way of one that shares half of it", Seqlock::over, 1, 1);
SCENARIO(Seqlock, "clock_cache", seqlock_evict, "a full bucket evicts while the newcomer is looked up", Seqlock::evict, 1, 1);
SCENARIO(Seqlock, "clock_cache", seqlock_unchanged, "a writer comes again and changes nothing", Seqlock::unchanged, 1, 1);
DEEP(Seqlock, "clock_cache", seqlock_three, "a writer, a holder who changes nothing, and a reader", Seqlock::unchanged, 1, 2);

// One thread forgets a key, as cache_forget does, beside one that looks or fills.
struct Forget : Scenario {
    enum What { looked_up, another_filled, replaced };
    What what;
    Table table;
    explicit Forget(What w) : what(w) {
        table.put(1, 1);
        table.put(2, 1);
    }
    int threads() const override { return 2; }
    void look() {
        bool gone = false;
        for (int i = 0; i < 2; ++i) {
            int n = table.find(1);
            EXPECT(!(gone && n), "what was forgotten is found again");
            gone = !n;
            EXPECT(table.find(2) == 1, "another key is lost");
        }
    }
    void run(int t) override {
        if (t == 1) table.take(1);
        else if (what == looked_up) look();
        else if (what == another_filled) table.put(3, 1);
        else table.put(1, 2);
    }
    void finish() override {
        if (what == replaced) EXPECT(table.find(1) != 1, "the first value is still there");
        else EXPECT(table.find(1) == 0, "what was forgotten is there");
        EXPECT(table.find(2) == 1, "another key is lost");
        if (what == another_filled) EXPECT(table.find(3) == 1, "a fill is lost");
    }
};
SCENARIO(Forget, "clock_cache", seqlock_forget, "a key is forgotten while it is looked up twice", Forget::looked_up);
SCENARIO(Forget, "clock_cache", seqlock_forget_and_fill, "a key is forgotten while another is filled", Forget::another_filled);
SCENARIO(Forget, "clock_cache", seqlock_forget_and_replace, "a key is forgotten while it is filled anew", Forget::replaced);

// Two threads fill one bucket, and both values are there.
struct Writers : Scenario {
    bool same;
    Table table;
    explicit Writers(bool s) : same(s) {}
    int threads() const override { return 2; }
    void run(int t) override { table.put(same ? 1 : t, t); }
    void finish() override {
        if (same) EXPECT(table.find(1) != 0, "neither value is there");
        else EXPECT(table.find(1) == 1 && table.find(2) == 2, "a fill is lost");
    }
};
SCENARIO(Writers, "clock_cache", seqlock_two_writers, "two keys are filled at once", false);
SCENARIO(Writers, "clock_cache", seqlock_two_writers_one_key, "one key is filled twice at once", true);

// A value that is a pointer: whoever holds a reference never sees it freed. The counter is prediction.pyx's.
struct Blobs : Scenario {
    static constexpr int count = 2;
    bool hold_late;  // planted: take the reference after the bucket was unlocked
    Table table;
    Atomic<uint32_t> refs[count];
    Data<uint32_t> body[count];
    int freed[count] = {};
    explicit Blobs(bool late) : hold_late(late) {
        for (int i = 0; i < count; ++i) {
            name(refs[i], "refs", i);
            body[i].name = "a blob";
            refs[i].store(1, Order{-1, Mo::memory_order_relaxed});
        }
        bool evicted;
        uint32_t sequence = clipper::bucket_lock(table.bucket);
        clipper::bucket_fill(table.bucket, lo_of(1), hi_of(1), Found{0, 0x80}, &evicted);
        clipper::bucket_unlock(table.bucket, sequence);
    }
    int threads() const override { return 2; }
    void hold(uint64_t blob) {
        EXPECT(refs[blob].fetch_add(1, Order{-1, Mo::memory_order_relaxed}) > 0, "a reference to a blob that is freed");
    }
    void drop(uint64_t blob) {
        if (refs[blob].fetch_sub(1, Order{-1, Mo::memory_order_acq_rel}) != 1) return;
        body[blob] = 0;
        ++freed[blob];
    }
    void run(int t) override {
        if (t == 1) {
            bool evicted;
            uint32_t sequence = clipper::bucket_lock(table.bucket);
            Found gone = clipper::bucket_fill(table.bucket, lo_of(1), hi_of(1), Found{1, 0x80}, &evicted);
            clipper::bucket_unlock(table.bucket, sequence);
            if (gone.tag) drop(gone.word);
            return;
        }
        Found found = hold_late ? clipper::bucket_find(table.bucket, lo_of(1), hi_of(1))
                                : clipper::bucket_find_held(table.bucket, lo_of(1), hi_of(1), [&](Found f) { hold(f.word); });
        if (!found.tag) return;
        if (hold_late) hold(found.word);
        EXPECT(body[found.word] == 0, "a blob");
        drop(found.word);
    }
    void finish() override { EXPECT(freed[0] == 1 && freed[1] == 0, "the replaced blob is freed once, the new one not"); }
};
SCENARIO(Blobs, "clock_cache", blob_lifetime, "a blob is looked up while it is replaced and freed", false);
BROKEN(Blobs, "clock_cache", planted_blob_held_late, "the reference to a blob is taken without the bucket's lock", true);

// Two bits of one word, each under its own bucket's lock.
struct BitMap : Scenario {
    Atomic<uint64_t> words[1];
    BitMap() {
        name(words[0], "bit map");
        clipper::map_write(words, 3, true);
    }
    int threads() const override { return 3; }
    void run(int t) override { clipper::map_write(words, uint64_t(t), t != 3); }
    void finish() override {
        EXPECT(words[0].load(Order{-1, Mo::memory_order_relaxed}) == 0b0110, "a bit is lost");
    }
};
SCENARIO(BitMap, "clock_cache", blob_map, "three threads write a bit each of one word");

// As clock_cache.pyx has the memory of a bucket there before it is used: a touch takes back nothing that a writer did.
struct Touch : Scenario {
    int writes;
    Table table;
    uint32_t begun, step;
    Touch(int n) : writes(n) {
        begun = table.bucket.sequence.peek();
        table.put(1, 1);
        step = table.bucket.sequence.peek() - begun;
    }
    int threads() const override { return 2; }
    void run(int t) override {
        if (t == 1) for (int i = 0; i < writes; ++i) table.put(1, 2 + i);
        else clipper::bucket_touch(table.bucket);
    }
    void finish() override {
        EXPECT(table.bucket.sequence.peek() == begun + step * (1 + writes), "a touch takes a write's sequence back");
    }
};
SCENARIO(Touch, "clock_cache", seqlock_touch, "a bucket is touched while it is written", 1);
SCENARIO(Touch, "clock_cache", seqlock_touch_twice, "a bucket is touched while it is written twice", 2);

}  // namespace
}  // namespace schedules
