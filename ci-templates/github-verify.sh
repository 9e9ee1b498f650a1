# What the action runs. Everything comes in through UCP_* variables, never through the text of a script.
set -u

report=$RUNNER_TEMP/ucp-report.json
sarif=$RUNNER_TEMP/ucp.sarif
options=(--format github -o "$report" -o "$sarif" --fail-on "${UCP_FAIL_ON:-error}")
case "${UCP_LEVEL:-default}" in
    quick | deep) options+=("--$UCP_LEVEL") ;;
    default) ;;
    *)
        echo "::error::level is quick, default or deep, not $UCP_LEVEL"
        exit 2
        ;;
esac
for check in ${UCP_ALLOW:-}; do options+=(--allow "$check"); done
[ -z "${UCP_BASELINE:-}" ] || options+=(--baseline "$UCP_BASELINE")
[ -z "${UCP_TAG:-}" ] || options+=(--tag "$UCP_TAG")
[ -z "${UCP_JOBS:-}" ] || options+=(--jobs "$UCP_JOBS")

rm -f "$report" "$sarif"
ucp verify "${options[@]}" -- "$UCP_CHECKPOINT" 2>"$RUNNER_TEMP/ucp-verdict.txt"
code=$?
cat "$RUNNER_TEMP/ucp-verdict.txt" >&2

{
    echo "exit-code=$code"
    if [ "$code" -eq 0 ]; then echo "ok=true"; else echo "ok=false"; fi
    if [ -f "$report" ]; then echo "report=$report"; fi
    if [ -f "$sarif" ]; then echo "sarif=$sarif"; fi
} >>"$GITHUB_OUTPUT"
{
    echo "### ucp verify"
    echo
    echo '```'
    tail -n 1 "$RUNNER_TEMP/ucp-verdict.txt"
    echo '```'
} >>"$GITHUB_STEP_SUMMARY"
exit "$code"
