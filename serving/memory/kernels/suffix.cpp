// The look-up of the suffix cache: what occurrences.py defines, on the same arrays.
//
// A context is the last C tokens of a sequence, read backwards from `last`. A position is the index of the token that
// follows an occurrence. No match and no path crosses a SENTINEL (-1), and every tokens array begins and ends with one.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr int32_t kSentinel = -1;
constexpr int kKeyTokens = 3;
constexpr int kKeyBits = 21;

using Wide = unsigned __int128;

struct Limits {
  const int32_t* lengths;  // lengths[m]: the longest path after a match of m tokens; never falls
  int64_t max_depth;
  int64_t max_occurrences;
  int64_t examined;  // occurrences of the shortest indexed context that are tried for a longer match
  double min_prob;
};

struct Context {
  const int32_t* last;
  int size;
  int32_t operator[](int i) const { return last[-i]; }
};

struct Segment {
  const int64_t* keys;
  const int32_t* offsets;
  int64_t num_keys;
  int64_t start;
};

// One request's own tokens: SENTINEL, `length` tokens, SENTINEL, in an array of `capacity`.
struct Memory {
  int32_t* tokens;
  int64_t length, capacity;
};

// One tenant's responses; positions up to `front` are forgotten.
struct Tenant {
  const int32_t* tokens;
  const Segment* segments;
  int64_t num_segments;
  int64_t front;
};

constexpr int kMostDrafted = 256, kMostOfPlace = 64;

struct Match {
  double score;
  int32_t match_length, is_local, size;
  float predicted;  // what a judge says of it, else NaN
  int32_t numbers[2 * kMostDrafted + kMostOfPlace / 4];  // `size` ids, then as many probabilities, then its place
};

// Who says what a match is worth, given bytes that tell its place: dh_yields of yields.cpp and what it wants to be told.
struct Judge {
  void (*run)(const void* network, const void* kinds, const char* match, int64_t count, float* room, float* yields);
  const void *network, *kinds;
  float* room;
  const char* first;  // weights that it reads first
  int64_t num_first;
};

struct Interval {
  int64_t low, high;
};

// Where `key` would go among the keys of each segment. After a pass over a model's weights no key is in a cache: a search
// alone waits for memory at every step, those of all segments wait together.
std::vector<int64_t> lower_bounds(const Segment* segments, int64_t count, int64_t key) {
  std::vector<int64_t> places(count), left(count);
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, left[i] = segments[i].num_keys);
  for (; most > 0; most /= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if (!left[i]) continue;
      const int64_t* keys = segments[i].keys + places[i];
      int64_t middle = left[i] / 2;
      bool is_behind = keys[middle] < key;
      places[i] += is_behind ? middle + 1 : 0;
      left[i] = is_behind ? left[i] - middle - 1 : middle;
      __builtin_prefetch(segments[i].keys + places[i] + left[i] / 2);
    }
  }
  return places;
}

// The same for a key that goes to `at` or behind it, and is sought in growing steps: it is near, as a rule.
int64_t bound_behind(const Segment& segment, int64_t key, int64_t at) {
  int64_t step = 1;
  for (; at + step <= segment.num_keys && segment.keys[at + step - 1] < key; step *= 2) at += step;
  const int64_t stop = std::min(at + step - 1, segment.num_keys);
  return std::lower_bound(segment.keys + at, segment.keys + stop, key) - segment.keys;
}

// For a key that goes to `at` or before it.
int64_t bound_before(const Segment& segment, int64_t key, int64_t at) {
  int64_t step = 1;
  for (; at >= step && segment.keys[at - step] >= key; step *= 2) at -= step;
  const int64_t start = std::max<int64_t>(at - step + 1, 0);
  return std::lower_bound(segment.keys + start, segment.keys + at, key) - segment.keys;
}

// Sums to about 106 bits, so that the result is the exact sum rounded once, like math.fsum.
struct ExactSum {
  double high = 0.0, low = 0.0;
  void add(double x) {
    double sum = high + x, part = sum - high;
    low += (high - (sum - part)) + (x - part);
    high = sum;
  }
  double value() const { return high + low; }
};

// A product of count / total, in lowest terms as long as it fits.
struct Ratio {
  Wide numerator = 1, denominator = 1;

  void times(uint64_t count, uint64_t total) {
    if ((numerator | denominator) >> 100) {  // 64 uneven steps: the last bit may be lost from here on
      numerator >>= 30, denominator >>= 30;
    }
    numerator *= count;
    denominator *= total;
    Wide divisor = (numerator | denominator) >> 64
                       ? common_divisor(numerator, denominator)
                       : std::gcd(static_cast<uint64_t>(numerator), static_cast<uint64_t>(denominator));
    if (divisor > 1) numerator /= divisor, denominator /= divisor;
  }

  static Wide common_divisor(Wide a, Wide b) {
    while (b) {
      Wide rest = a % b;
      a = b, b = rest;
    }
    return a;
  }

  double value() const {
    if (!(numerator >> 53) && !(denominator >> 53))
      return static_cast<double>(static_cast<uint64_t>(numerator)) / static_cast<double>(static_cast<uint64_t>(denominator));
    return static_cast<double>(static_cast<long double>(numerator) / static_cast<long double>(denominator));
  }
};

struct Path {
  std::vector<int32_t> ids;
  std::vector<double> probabilities;
  double score = 0.0;
  int match_length = 0;
};

using Positions = std::vector<int64_t>;

// Keeps the `count` highest positions, in any order.
void keep_most_recent(Positions& positions, int64_t count) {
  if (static_cast<int64_t>(positions.size()) <= count) return;
  std::nth_element(positions.begin(), positions.begin() + count, positions.end(), std::greater<int64_t>());
  positions.resize(count);
}

struct Followed {
  int32_t token;
  uint64_t count, total;  // total: places that have a next token at all
};

// The token that follows most often, the lowest id on ties; total 0 where nothing follows.
Followed most_frequent(const int32_t* tokens, const Positions& positions, int step, std::vector<int32_t>& column) {
  column.clear();
  bool is_one = true;
  for (int64_t position : positions) {
    int32_t token = tokens[position + step];
    if (token == kSentinel) continue;
    is_one = is_one && (column.empty() || token == column.front());
    column.push_back(token);
  }
  if (column.empty()) return {kSentinel, 0, 0};
  if (is_one) return {column.front(), column.size(), column.size()};
  std::sort(column.begin(), column.end());
  Followed best{kSentinel, 0, column.size()};
  for (size_t start = 0; start < column.size();) {
    size_t stop = start;
    while (stop < column.size() && column[stop] == column[start]) ++stop;
    if (stop - start > best.count) best.token = column[start], best.count = stop - start;
    start = stop;
  }
  return best;
}

// The best path so far, over levels that come longest match first.
class Search {
 public:
  Search(const int32_t* tokens, const Limits& limits, double floor_score)
      : tokens_(tokens), limits_(limits), floor_score_(floor_score) {}

  // Whether a level of this match length, or any shorter one, can still win.
  bool is_open(int match_length) const {
    int limit = limits_.lengths[match_length];
    return limit > best_.score && limit >= floor_score_;
  }

  void try_level(int match_length, Positions& positions) {
    keep_most_recent(positions, limits_.max_occurrences);
    walk(positions, limits_.lengths[match_length]);
    if (path_.score > best_.score) {
      std::swap(best_, path_);
      best_.match_length = match_length;
    }
  }

  // Levels of `known` tokens and more among `positions`; false where no shorter match can win.
  bool try_deep(const Context& context, const Positions& positions, int known) {
    for (int64_t position : positions) __builtin_prefetch(tokens_ + position - 1 - known);
    std::vector<int> depths(positions.size());
    std::vector<int> ends(context.size + 2, 0);  // ends[d]: how many positions match more than d tokens, then d or more
    for (size_t i = 0; i < positions.size(); ++i) {
      int depth = known;
      while (depth < context.size && tokens_[positions[i] - 1 - depth] == context[depth]) ++depth;
      depths[i] = depth;
      ++ends[depth - 1];
    }
    for (int depth = context.size; depth-- > 0;) ends[depth] += ends[depth + 1];
    Positions deepest_first(positions.size());
    for (size_t i = 0; i < positions.size(); ++i) deepest_first[ends[depths[i]]++] = positions[i];
    int count = 0;
    for (int depth = context.size; depth >= known; --depth) {
      if (ends[depth] == count) continue;
      count = ends[depth];
      if (!is_open(depth)) return false;
      Positions level(deepest_first.begin(), deepest_first.begin() + count);
      try_level(depth, level);
    }
    return true;
  }

  const Path& best() const { return best_; }

 private:
  void walk(Positions& positions, int limit) {
    path_.ids.clear();
    path_.probabilities.clear();
    Ratio ratio;
    ExactSum sum;
    double probability = 1.0;
    for (int step = 0; step < limit; ++step) {
      Followed next = most_frequent(tokens_, positions, step, column_);
      if (!next.total) break;
      if (next.count < next.total) {
        ratio.times(next.count, next.total);
        probability = ratio.value();
        if (probability < limits_.min_prob) break;
      }
      path_.ids.push_back(next.token);
      path_.probabilities.push_back(probability);
      sum.add(probability);
      if (next.count < positions.size()) {
        size_t kept = 0;
        for (int64_t position : positions)
          if (tokens_[position + step] == next.token) positions[kept++] = position;
        positions.resize(kept);
      }
    }
    path_.score = sum.value();
  }

  const int32_t* tokens_;
  const Limits& limits_;
  double floor_score_;
  Path best_, path_;
  std::vector<int32_t> column_;
};

// The occurrences that `intervals` hold, one interval a segment, newest segments first until there are `count`.
// Where all keys of an interval are equal its positions ascend, so the most recent ones are the last.
Positions collect(const Tenant& tenant, const std::vector<Interval>& intervals, int64_t count, bool is_ascending) {
  Positions found;
  for (size_t i = intervals.size(); i-- > 0;) {
    const Segment& segment = tenant.segments[i];
    int64_t missing = count - static_cast<int64_t>(found.size());
    if (missing <= 0) break;
    Positions part;
    for (int64_t at = intervals[i].high; at-- > intervals[i].low;) {
      int64_t position = segment.start + segment.offsets[at];
      if (position > tenant.front) part.push_back(position);
      if (is_ascending && static_cast<int64_t>(part.size()) == missing) break;
    }
    keep_most_recent(part, missing);
    found.insert(found.end(), part.begin(), part.end());
  }
  return found;
}

// The best path over the request's own tokens: SENTINEL, n tokens, SENTINEL.
Path best_local(const int32_t* tokens, const Context& context, int64_t n, const Limits& limits) {
  Search search(tokens, limits, 0.0);
  Positions positions;
  for (int64_t at = n; at >= 2 && static_cast<int64_t>(positions.size()) < limits.examined; --at)
    if (tokens[at - 1] == context[0]) positions.push_back(at);
  search.try_deep(context, positions, 1);
  return search.best();
}

// The same over the tenant's responses; paths that score below `floor_score` may be missed.
Path best_of(const Tenant& tenant, const Context& context, const Limits& limits, double floor_score) {
  Search search(tenant.tokens, limits, floor_score);
  int known = std::min(kKeyTokens, context.size);
  int64_t key = 0, keys[kKeyTokens];
  for (int m = 0; m < known; ++m) {
    key |= static_cast<int64_t>(context[m] + 1) << (kKeyBits * (kKeyTokens - 1 - m));
    keys[m] = key;
  }
  std::vector<Interval> intervals(tenant.num_segments);
  const std::vector<int64_t> starts = lower_bounds(tenant.segments, tenant.num_segments, keys[known - 1]);
  for (size_t i = 0; i < starts.size(); ++i) intervals[i] = {starts[i], starts[i]};
  int64_t total = 0;
  for (int m = known; m >= 1 && (m == known || search.is_open(m)); --m) {
    int64_t next = keys[m - 1] + (int64_t{1} << (kKeyBits * (kKeyTokens - m))), before = total;
    total = 0;
    for (size_t i = 0; i < intervals.size(); ++i) {  // those of a longer match lie within those of a shorter one
      const Segment& segment = tenant.segments[i];
      intervals[i] = {bound_before(segment, keys[m - 1], intervals[i].low),
                      bound_behind(segment, next, intervals[i].high)};
      total += intervals[i].high - intervals[i].low;
    }
    if (m == known) {
      Positions positions = collect(tenant, intervals, limits.examined, m == kKeyTokens);
      if (!search.try_deep(context, positions, known)) break;
    } else if (total > before) {
      Positions positions = collect(tenant, intervals, limits.max_occurrences, false);
      search.try_level(m, positions);
    }
  }
  return search.best();
}

// Writes `path`; returns the bytes it takes.
int put(const Path& path, Match& match) {
  const size_t size = path.ids.size();
  match.score = path.score;
  match.match_length = path.match_length;
  match.size = static_cast<int32_t>(size);
  match.predicted = NAN;
  std::copy(path.ids.begin(), path.ids.end(), match.numbers);
  for (size_t i = 0; i < size; ++i) {
    const float probability = static_cast<float>(path.probabilities[i]);
    std::memcpy(match.numbers + size + i, &probability, sizeof probability);
  }
  return static_cast<int>(offsetof(Match, numbers) + 2 * size * sizeof(int32_t));
}

// Makes `memory` hold ids[n]; false, and nothing is changed, where it has no room or one is no id.
bool follow(Memory& memory, const int32_t* ids, int64_t n) {
  constexpr int32_t kIdLimit = (1 << kKeyBits) - 2;
  if (n + 2 > memory.capacity) return false;
  int64_t common = std::mismatch(ids, ids + std::min(n, memory.length), memory.tokens + 1).first - ids;
  for (int64_t i = common; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= kIdLimit) return false;
  std::copy(ids + common, ids + n, memory.tokens + 1 + common);
  memory.tokens[n + 1] = kSentinel;
  memory.length = n;
  return true;
}

// The best path after the tokens of `memory`, among them and those of `tenant`, if there is one.
Path best_match(const Memory& memory, const Tenant* tenant, const Limits& limits, int32_t& is_local) {
  const int64_t n = memory.length;
  const Context context{memory.tokens + n, static_cast<int>(std::min(n, limits.max_depth))};
  is_local = false;
  if (!limits.lengths[context.size]) return {};
  Path best = best_local(memory.tokens, context, n, limits);
  is_local = !best.ids.empty();
  // In text that repeats itself a perfect local match of the whole context is common: nothing beats it.
  const double longest = limits.lengths[context.size];
  if (!tenant || longest < best.score || (longest == best.score && context.size <= best.match_length)) return best;
  Path found = best_of(*tenant, context, limits, best.score);
  if (found.score < best.score || (found.score == best.score && found.match_length <= best.match_length)) return best;
  is_local = false;
  return found;
}

}  // namespace

extern "C" {

// What lookup.py defines as the best match, after the request's tokens: first made to be ids[num_ids], unless that is
// null. No tenant may be known, and no judge, who is asked where a place is told. Returns the bytes of the match, below 0
// where the ids cannot be followed.
int dh_suffix(Memory* memory, const int32_t* ids, int64_t num_ids, const Tenant* tenant, const Limits* limits,
              const Judge* judge, const char* place, int64_t place_size, Match* match) {
  if (ids && !follow(*memory, ids, num_ids)) return -1;
  if (judge)  // they come while the search waits
    for (int64_t at = 0; at < judge->num_first; at += 64) __builtin_prefetch(judge->first + at);
  const int size = put(best_match(*memory, tenant, *limits, match->is_local), *match);
  if (judge && place_size > 0 && match->size) {
    std::memcpy(match->numbers + 2 * match->size, place, std::min<int64_t>(place_size, kMostOfPlace));
    judge->run(judge->network, judge->kinds, reinterpret_cast<const char*>(match), 1, judge->room, &match->predicted);
  }
  return size;
}
}
