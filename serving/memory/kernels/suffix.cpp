// The look-up of the suffix cache: what occurrences.py defines, on the same arrays.
//
// A context is the last C tokens of a sequence, read backwards from `last`. A position is the index of the token that
// follows an occurrence. No match and no path crosses a SENTINEL (-1), and every tokens array begins and ends with one.

#include <algorithm>
#include <cmath>
#include <cstdint>
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

struct Interval {
  int64_t low, high;
};

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
    Wide a = numerator, b = denominator;
    while (b) {
      Wide rest = a % b;
      a = b, b = rest;
    }
    numerator /= a, denominator /= a;
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

int copy_out(const Path& path, int32_t* ids, double* probabilities, int32_t* match_length, double* score) {
  std::copy(path.ids.begin(), path.ids.end(), ids);
  std::copy(path.probabilities.begin(), path.probabilities.end(), probabilities);
  *match_length = path.match_length;
  *score = path.score;
  return static_cast<int>(path.ids.size());
}

// The occurrences that `intervals` hold, one interval a segment, newest segments first until there are `count`.
// Where all keys of an interval are equal its positions ascend, so the most recent ones are the last.
Positions collect(const Segment* segments, const std::vector<Interval>& intervals, int64_t front, int64_t count,
                  bool is_ascending) {
  Positions found;
  for (size_t i = intervals.size(); i-- > 0;) {
    const Segment& segment = segments[i];
    int64_t missing = count - static_cast<int64_t>(found.size());
    if (missing <= 0) break;
    Positions part;
    for (int64_t at = intervals[i].high; at-- > intervals[i].low;) {
      int64_t position = segment.start + segment.offsets[at];
      if (position > front) part.push_back(position);
      if (is_ascending && static_cast<int64_t>(part.size()) == missing) break;
    }
    keep_most_recent(part, missing);
    found.insert(found.end(), part.begin(), part.end());
  }
  return found;
}

}  // namespace

extern "C" {

// tokens holds SENTINEL, n tokens, SENTINEL; writes the best path after the last token, returns its length.
int dh_suffix_local(const int32_t* tokens, int64_t n, const Limits* limits, int32_t* ids, double* probabilities,
                    int32_t* match_length, double* score) {
  Context context{tokens + n, static_cast<int>(std::min(n, limits->max_depth))};
  Search search(tokens, *limits, 0.0);
  Positions positions;
  for (int64_t at = n; at >= 2 && static_cast<int64_t>(positions.size()) < limits->examined; --at)
    if (tokens[at - 1] == context[0]) positions.push_back(at);
  search.try_deep(context, positions, 1);
  return copy_out(search.best(), ids, probabilities, match_length, score);
}

// The same over the responses of `segments`, of which those before `front` are forgotten, after the token at `last`.
int dh_suffix_global(const int32_t* tokens, const Segment* segments, int64_t num_segments, int64_t front,
                     const int32_t* last, int64_t size, const Limits* limits, double floor_score, int32_t* ids,
                     double* probabilities, int32_t* match_length, double* score) {
  Context context{last, static_cast<int>(std::min(size, limits->max_depth))};
  Search search(tokens, *limits, floor_score);
  int known = std::min(kKeyTokens, context.size);
  int64_t key = 0, keys[kKeyTokens];
  for (int m = 0; m < known; ++m) {
    key |= static_cast<int64_t>(context[m] + 1) << (kKeyBits * (kKeyTokens - 1 - m));
    keys[m] = key;
  }
  std::vector<Interval> intervals(num_segments);
  int64_t total = 0;
  for (int m = known; m >= 1 && (m == known || search.is_open(m)); --m) {
    int64_t next = keys[m - 1] + (int64_t{1} << (kKeyBits * (kKeyTokens - m))), before = total;
    total = 0;
    for (int64_t i = 0; i < num_segments; ++i) {
      const int64_t *begin = segments[i].keys, *end = begin + segments[i].num_keys;
      const int64_t* low = std::lower_bound(begin, end, keys[m - 1]);
      intervals[i] = {low - begin, std::lower_bound(low, end, next) - begin};
      total += intervals[i].high - intervals[i].low;
    }
    if (m == known) {
      Positions positions = collect(segments, intervals, front, limits->examined, m == kKeyTokens);
      if (!search.try_deep(context, positions, known)) break;
    } else if (total > before) {
      Positions positions = collect(segments, intervals, front, limits->max_occurrences, false);
      search.try_level(m, positions);
    }
  }
  return copy_out(search.best(), ids, probabilities, match_length, score);
}
}
