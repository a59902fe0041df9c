run=/slipstream/runs/@{name}
if [ -e "$run/config.toml" ]; then
  set -- --resume "$run"
else
  set -- --out "$run"
fi
export SLIPSTREAM_GO_ON='submit.sh of the job files of @{name}'
exec slipstream launch @{recipe_file} "$@" --group controller@{remote} --listen "@{address}:@{port}" \
  --join-timeout @{join_s}
